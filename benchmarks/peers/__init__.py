"""danlu beside the tools people already use, on one machine, in the same minutes.

``python -m benchmarks.peers`` keeps one process a peer alive, gives each a few training steps in
turn, round after round, and compares only what was measured side by side. Why so: shared machines
drift by a factor of two within minutes, so two figures from two runs compare nothing.

``workload`` what is trained; ``protocol`` what a runner must speak; ``runners/`` one file a peer;
``environments`` their packages; ``process`` and ``rounds`` who measures when; ``figures`` the
arithmetic; ``report`` the JSON and the table.
"""
