"""The leak lab: labelled series for the detector, and real processes that leak or only look so."""
