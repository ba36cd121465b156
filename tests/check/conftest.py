# SPDX-License-Identifier: Apache-2.0
"""Makes the helpers of this folder importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
