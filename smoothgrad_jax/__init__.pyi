# What the names are that __init__.py imports when they are first used, for editors and type checkers.
from smoothgrad_jax import diagnostics as diagnostics
from smoothgrad_jax import dirichlet as dirichlet
from smoothgrad_jax import store as store
from smoothgrad_jax import text as text
from smoothgrad_jax import window as window
from smoothgrad_jax.corpus import Corpus as Corpus
from smoothgrad_jax.corpus import prefetch as prefetch
from smoothgrad_jax.corpus import sample as sample
from smoothgrad_jax.diagnostics import averaged_step as averaged_step
from smoothgrad_jax.diagnostics import bias_variance as bias_variance
from smoothgrad_jax.diagnostics import count_negative as count_negative
from smoothgrad_jax.documents import Batch as Batch
from smoothgrad_jax.documents import pack as pack
from smoothgrad_jax.lda import LDA as LDA
from smoothgrad_jax.lda import LocalInfo as LocalInfo
from smoothgrad_jax.lda import elbo as elbo
from smoothgrad_jax.lda import init_topics as init_topics
from smoothgrad_jax.lda import local_step as local_step
from smoothgrad_jax.lda import log_predictive as log_predictive
from smoothgrad_jax.lda import split_documents as split_documents
from smoothgrad_jax.lda import topics as topics
from smoothgrad_jax.svi import SVIState as SVIState
from smoothgrad_jax.svi import global_step as global_step
from smoothgrad_jax.svi import init as init
from smoothgrad_jax.svi import phase_out as phase_out
from smoothgrad_jax.svi import robbins_monro as robbins_monro
from smoothgrad_jax.svi import run as run
from smoothgrad_jax.svi import sweep as sweep
from smoothgrad_jax.training import NotFiniteError as NotFiniteError
from smoothgrad_jax.training import Progress as Progress
from smoothgrad_jax.training import Training as Training
from smoothgrad_jax.training import fit as fit
from smoothgrad_jax.transform import natural_gradient as natural_gradient
from smoothgrad_jax.transform import smoothed_svi as smoothed_svi
from smoothgrad_jax.transform import window_mean as window_mean

__version__: str
