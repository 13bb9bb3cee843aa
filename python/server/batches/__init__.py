"""Files and batches: stored on disk, worked off in the background, safe against a kill.

    file_routes, batch_routes   HTTP; `upload` reads forms
    service                     opens and closes all of it for an app
    database                    SQLite: one thread writes, one reads
    storage                     contents: written, synced, renamed before the database names them
    files, store                every change of state, one transaction each; `records` are the rows
    worker, lease               which process works: the lease
    crew                        on which batches
    job                         one batch: check its lines, run them, conclude, write its files
    lines, answers, output      what a line must be, what becomes of it, and of all of them
    results                     answers of lines, stored in groups, once for each line
    gate                        how many sequences are in flight, all batches together

A job asks the database where it stands and goes on from there, so that it does not matter where the
last one was killed: answers lie in the table `results` until the output files are listed, in the
transaction that ends the batch. Every write of the worker checks the token of its lease in the same
transaction: a process that was suspended cannot write after another has taken over.
"""
