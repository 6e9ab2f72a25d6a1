"""The one error that the commands turn into a sentence and exit code 2."""


class EvalError(RuntimeError):
    """Something the caller can put right; the message says what and how."""
