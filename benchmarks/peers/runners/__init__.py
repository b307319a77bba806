"""One file a peer: ``NAME_run.py`` declares ``PEER`` and trains when the gate says so."""
