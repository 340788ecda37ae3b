"""What can go wrong with a calibration and is not another part's to say."""


class CalibrationError(ValueError):
    """The calibration cannot be made; the message says why and what to do."""
