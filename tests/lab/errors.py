"""What a lab raises."""


class LabError(RuntimeError):
    """A lab that cannot be built or started; the message says what is missing or what failed."""


class MissingError(LabError):
    """A program or a permission that this machine lacks; the message says how to get it."""
