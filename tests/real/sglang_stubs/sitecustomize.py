"""Run by Python at its start. Declares two operators that torchvision only has with its compiled library, just
before torchvision is imported and registers their fake kernels."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

_kept: list[Any] = []
"""The declarations live as long as the library object."""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
