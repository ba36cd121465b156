# SPDX-License-Identifier: Apache-2.0
"""nn.Module + example inputs -> Graph: the door is `capture`."""

from autoplan.capture.structure import InputLeaf, OutputTree, leaf_path
from autoplan.capture.trace import Captured, ExampleInputs, LossFn, capture

__all__ = ["Captured", "ExampleInputs", "InputLeaf", "LossFn", "OutputTree", "capture", "leaf_path"]
