"""What a process with a scheduler imports; the fork server does it once for all of them."""

# The table of seams names symbols of the HTTP server.
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401
