"""Errors that name the option at fault, so that each caller can report it under its own name."""


class OptionError(ValueError):
    """An option has a value that cannot be used.

    The command line and the estimator catch this error and replace ``option`` by the name that their user typed.

    Attributes:
      option: Name of the option in the library.
      problem: The rest of the message, for example ``"must be positive, got -1"``.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option} {problem}")
        self.option, self.problem = option, problem
