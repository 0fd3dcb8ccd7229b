"""Peak FLOP/s of accelerators for dense matrix products, by type, from the makers' data sheets. No torch here."""

import re

# Teraflop/s by device name (matched by whole words; the longest match wins) and type, without sparsity; fp32 as PyTorch
# computes it by default, without TF32. Data sheets by NVIDIA: V100 2020, T4 2019, A10G, A40 and A100 2021, L40S and
# H100 2023, H200 2024, HGX B200 2025; whitepapers: GA102 2020, Ada 2022.
TERAFLOPS: dict[str, dict[str, float]] = {
    "V100": {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
    "V100-PCIE": {"fp64": 7, "fp32": 14, "fp16": 112},
    "T4": {"fp32": 8.1, "fp16": 65},
    "A10G": {"fp32": 35, "bf16": 70, "fp16": 70},
    "A40": {"fp32": 37.4, "bf16": 149.7, "fp16": 149.7},
    "A100": {"fp64": 19.5, "fp32": 19.5, "bf16": 312, "fp16": 312},
    "L40S": {"fp32": 91.6, "bf16": 362, "fp16": 362, "fp8": 733},
    "RTX 3090": {"fp32": 35.6, "bf16": 71, "fp16": 71},
    "RTX 4090": {"fp32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    "H100": {"fp64": 66.9, "fp32": 66.9, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    "H100 PCIe": {"fp64": 51, "fp32": 51, "bf16": 756, "fp16": 756, "fp8": 1513},
    "H100 NVL": {"fp64": 60, "fp32": 60, "bf16": 835, "fp16": 835, "fp8": 1671},
    "H200": {"fp64": 66.9, "fp32": 66.9, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    "H200 NVL": {"fp64": 60, "fp32": 60, "bf16": 835, "fp16": 835, "fp8": 1671},
    "B200": {"fp64": 37, "fp32": 75, "bf16": 2250, "fp16": 2250, "fp8": 4500},
}
# Words that mark a different chip, or a part of one: an RTX 4080 SUPER is not an RTX 4080.
_OTHER_VARIANT = re.compile(r"\b(Laptop|Mobile|Max-Q|MIG|Ti|SUPER|D)\b", re.IGNORECASE)


def find_peaks(device_name: str) -> dict[str, float]:
    """Peak FLOP/s of a device by type; empty for one that is not in the table. Names are compared by whole words: an
    RTX A4000 is not an A40, and the laptop version of a card is a different chip.
    """
    if _OTHER_VARIANT.search(device_name):
        return {}
    known = [name for name in TERAFLOPS if re.search(rf"\b{re.escape(name)}\b", device_name)]
    return {dtype: tera * 1e12 for dtype, tera in TERAFLOPS[max(known, key=len)].items()} if known else {}
