"""The commands of ``smoothgrad``: one module per command, with a function ``run(args) -> exit code``.

:mod:`smoothgrad_jax.app.cli` declares the options of each command and imports its module when it is called. Results
are written to the standard output, messages to the standard error.
"""
