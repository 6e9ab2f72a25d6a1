"""What a process with a scheduler imports; the fork server does it once for all of them."""

import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401
