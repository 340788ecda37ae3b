"""Is this installation able to serve with Medusa, and if not, which command mends it?

``packages.py``, ``engine.py``, ``cpu.py`` and ``cluster.py`` each look at one part and return
findings; ``run.py`` asks them all. vLLM and torch are only loaded in ``probe.py``, which runs in a
process of its own: a broken installation must not take the doctor down with it.
"""
