"""Tables of states and answers: what `sfumato decide` and `sfumato calibrate` share."""
