"""Run by Python at its start. Declares two operators that torchvision only has with its compiled library, just
before torchvision is imported and registers their fake kernels; and lets SGLang's adapters ask for pinned memory on a
machine that has none, which gives them ordinary memory."""

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
            _without_pinned_memory(torch)
        return None


def _without_pinned_memory(torch: Any) -> None:
    def unpinned(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return made

    if not torch.cuda.is_available():
        for name in ("tensor", "zeros", "empty", "arange"):
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda tensor, *args: tensor


sys.meta_path.insert(0, _BeforeTorchvision())
