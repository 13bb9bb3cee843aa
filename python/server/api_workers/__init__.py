"""Several HTTP processes on one port.

The first (`serve.py`) supervises the engines, owns files, batches, stored responses and the
metrics, and keeps the *API workers* here: processes with a listening socket on the same port and a
client of their own at every engine.

| file | what |
|---|---|
| `orders.py` | what the two say to each other, lines of JSON over two pipes |
| `pool.py` | the first process's side: start, tell of the engines, count, drain, restart |
| `turns.py` | in which order the processes come back to an engine that was started again |
| `child.py` | an API worker: `python -m trunkline.server.api_workers.child` |
| `relay.py` | requests for what only the first process has, handed on to it |
"""
