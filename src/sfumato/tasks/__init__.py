"""What a request is: a task, a generator of works. Each kind of request is one file.

`works.py` has what a task may ask of the network, `alone.py` the plain driver. The other driver is
the engine.
"""
