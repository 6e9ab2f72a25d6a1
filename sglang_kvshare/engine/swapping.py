from sglang_kvshare.scheduling.preemption_cost import Way


def preempt(scheduler, batch, at):
    batch.release_req(at, len(batch.reqs) - 1)
    return "recompute"


def tokens_on_their_way(cache):
    return 0


def way_of(cache, req):
    return Way("recompute", 1.0, 1.0)
