"""A platform of verl's for machines without an accelerator: the CPU, ranks talking over gloo.

verl imports it where VERL_USE_EXTERNAL_MODULES=cpu_platform, and takes it with VERL_PLATFORM=cpu.
"""

import types
from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
DEVICE = types.SimpleNamespace(
    **dict.fromkeys(MEMORY, lambda *args: 0),
    current_device=lambda: "cpu",
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_rng_state=torch.get_rng_state,
    is_available=lambda: False,
    mem_get_info=lambda *args: (0, 0),
    set_rng_state=torch.set_rng_state,
    synchronize=lambda *args: None,
)


def _nothing(self, *args):
    return None


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False
