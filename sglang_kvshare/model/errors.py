"""The one error that `kvshare model` shows to its user."""


class ModelError(Exception):
    """A model folder could not be made; the message is one clear sentence for the user."""
