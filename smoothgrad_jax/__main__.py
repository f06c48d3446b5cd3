"""``python -m smoothgrad_jax`` is the command ``smoothgrad``."""

import sys

from smoothgrad_jax.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
