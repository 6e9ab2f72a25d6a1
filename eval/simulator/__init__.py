"""A discrete-event simulator of one SGLang server: what a schedule does, before it is built in.

    requests.py, workloads.py              what arrives: lengths, blocks, SLOs; arrays, no text
    costs.py, presets/                     what a forward and a copy take on a named machine
    machine.py                             the clock, and SGLang's scheduling pass
    waiting_queue.py, holds.py             who waits: predictions, order, who is held for a donor
    prefill.py                             who is admitted, in which chunks
    decode_batch.py                        who decodes, as sums; steps are jumped over
    preemption.py, swaps.py                who must leave, and what is in host memory
    holdings.py, contents.py               what each request holds; its blocks in the cache
    reservation.py                         for whom there is room
    kv_cache.py                            the KV pool and its radix tree, a block a node
    copies.py                              the link to the host's memory
    felt.py, gaps.py, results.py           what users felt
    settings.py, sides.py                  stock, KVShare, and each part alone
    experiments.py                         sweeps, ablations, repeats
    cli.py, cli_options.py, tables.py      the command line
    calibrate.py, measuring.py, validate.py    a running server: its costs, and how near this comes

Decisions are made by the objects of ``sglang_kvshare.scheduling``, the same that a server runs.
"""
