"""One signature per operation, and the choice of who serves it.

Every operation has a plain-torch specification in `reference`.  A faster twin replaces a name
here, once, at import, and says why in the log; callers never choose.  This module knows no layers.
"""

from __future__ import annotations

import logging

from sfumato.ops.reference import attention, dense, embed, experts, linear, rms_norm, rotate

__all__ = ["attention", "backend", "dense", "embed", "experts", "linear", "rms_norm", "rotate"]

backend = "torch"  # who serves the operations, for `sfumato doctor` and the logs
logging.getLogger(__name__).debug("operations run on %s: no compiled twins in this build", backend)
