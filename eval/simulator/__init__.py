"""A discrete-event simulator of one SGLang server: what a schedule does, before it is built in.

    requests.py, workloads.py, replay.py   what arrives: lengths, blocks, SLOs; arrays, no text
    costs.py, presets/                     what a forward and a copy take on a named machine
    kv_cache.py                            the KV pool and its radix tree, a block a node
    copies.py                              the link to the host's memory
    reservation.py                         who may be admitted, and who must leave
    machine.py                             SGLang's scheduling pass; decode steps are jumped over
    gaps.py, results.py                    what users felt
    settings.py, sides.py                  stock, KVShare, and each part alone
    experiments.py, cli.py                 sweeps, ablations, repeats
    calibrate.py, validate.py              a running server: its costs, and how near this comes

Decisions are made by the objects of ``sglang_kvshare.scheduling``, the same that a server runs.
"""
