"""Delimited values with a header: one document per record, one of whose columns is the text."""

from smoothgrad_jax.data.records import table_format

FORMAT = table_format("csv", ",;|\t", priority=61)
