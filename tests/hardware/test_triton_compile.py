"""The kernels of the heuristic configs stay within their budgets when compiled for NVIDIA GPUs. No GPU is needed.

Kernels are compiled in a process of their own, because other tests switch on Triton's interpreter, which cannot compile. A
change that needs more shared memory, registers or stack must change the budget here.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

LIMITS = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes of shared memory that one program may take

# bfloat16, widths of 128, Triton 3.9, by gate, and the dtype of per-key gates if it is not bfloat16: (bytes of shared memory,
# registers per thread, bytes of stack (spills) per thread) on sm_80, sm_90 and sm_100.
BUDGETS = {
    ("key", "scale_operands"): [(57_344, 250, 0), (57_344, 211, 0), (41_008, 228, 0)],
    ("key", "exact_scores"): [(12_288, 255, 8), (12_288, 254, 0), (12_296, 226, 0)],
    ("key", "outputs"): [(49_152, 255, 96), (114_688, 170, 0), (91_160, 211, 0)],
    ("key", "chunk_states"): [(24_576, 168, 0), (51_200, 127, 0), (57_360, 200, 0)],
    ("key", "gradient"): [(96_640, 255, 112), (98_688, 255, 136), (105_072, 255, 88)],
    ("key", "exact_gradient"): [(69_632, 255, 760), (79_872, 255, 552), (47_112, 255, 248)],
    ("key", "recurrent"): [(8_192, 64, 0), (2_048, 60, 0), (2_048, 56, 0)],
    ("key", "step"): [(512, 40, 0), (512, 42, 0), (512, 42, 0)],
    ("key/float32", "scale_operands"): [(40_960, 255, 16), (49_152, 246, 0), (57_392, 234, 0)],
    ("key/float32", "exact_scores"): [(20_480, 255, 8), (20_480, 254, 0), (12_296, 220, 0)],
    ("key/float32", "chunk_states"): [(24_576, 168, 0), (51_200, 127, 0), (57_360, 200, 0)],
    ("key/float32", "gradient"): [(94_592, 255, 264), (96_640, 255, 216), (113_264, 255, 120)],
    ("key/float32", "exact_gradient"): [(57_344, 128, 2968), (73_728, 255, 1616), (45_064, 72, 1776)],
    ("head", "head_gate_cumsums"): [(512, 48, 0), (512, 40, 0), (512, 40, 0)],
    ("head", "outputs"): [(41_984, 255, 448), (91_136, 255, 64), (100_384, 204, 0)],
    ("head", "chunk_states"): [(25_600, 223, 0), (50_176, 128, 0), (58_384, 128, 0)],
    ("head", "gradient"): [(126_976, 255, 184), (110_592, 255, 368), (151_632, 255, 120)],
    ("head", "recurrent"): [(8_192, 56, 0), (2_048, 64, 0), (2_048, 56, 0)],
    ("head", "step"): [(512, 42, 0), (512, 41, 0), (512, 40, 0)],
    ("delta", "head_gate_cumsums"): [(512, 48, 0), (512, 40, 0), (512, 40, 0)],
    ("delta", "delta_scores"): [(34_816, 230, 0), (32_768, 167, 0), (32_776, 168, 0)],
    ("delta", "delta_outputs"): [(64_000, 255, 32), (183_296, 255, 120), (140_816, 255, 160)],
    ("delta", "delta_states"): [(62_208, 255, 56), (115_456, 255, 104), (95_264, 255, 456)],
    ("delta", "delta_gradient"): [(36_864, 255, 200), (65_536, 255, 16), (77_832, 254, 0)],
    ("kda", "delta_key_pairs"): [(28_672, 255, 64), (28_672, 255, 16), (24_688, 237, 0)],
    ("kda", "exact_delta_key_pairs"): [(24_576, 255, 240), (26_624, 255, 16), (24_576, 255, 64)],
    ("kda", "delta_outputs"): [(80_128, 255, 8), (157_952, 251, 0), (82_688, 255, 248)],
    ("kda", "delta_states"): [(73_984, 255, 16), (155_904, 255, 104), (103_192, 255, 264)],
    ("kda", "delta_key_gradient"): [(49_152, 255, 168), (110_592, 251, 0), (110_712, 255, 48)],
    ("kda", "exact_delta_key_gradient"): [(45_056, 255, 848), (110_592, 255, 896), (83_976, 255, 368)],
    ("delta-erase", "head_gate_cumsums"): [(512, 48, 0), (512, 40, 0), (512, 40, 0)],
    ("delta-erase", "delta_scores"): [(32_768, 222, 0), (49_152, 152, 0), (49_160, 168, 0)],
    ("delta-erase", "delta_outputs"): [(82_176, 255, 8), (164_096, 255, 40), (107_296, 255, 224)],
    ("delta-erase", "delta_states"): [(78_336, 255, 16), (147_968, 255, 152), (111_392, 255, 424)],
    ("delta-erase", "delta_gradient"): [(43_008, 255, 248), (77_824, 228, 0), (77_832, 212, 0)],
    ("kda-erase", "delta_key_pairs"): [(32_768, 255, 80), (32_768, 255, 0), (28_784, 240, 0)],
    ("kda-erase", "exact_delta_key_pairs"): [(24_576, 255, 256), (26_624, 255, 16), (24_576, 255, 72)],
    ("kda-erase", "delta_outputs"): [(81_920, 255, 0), (163_840, 255, 0), (90_640, 255, 256)],
    ("kda-erase", "delta_states"): [(73_728, 255, 16), (155_648, 255, 72), (102_936, 255, 360)],
    ("kda-erase", "delta_key_gradient"): [(49_152, 255, 464), (110_592, 255, 40), (110_696, 255, 168)],
    ("kda-erase", "exact_delta_key_gradient"): [(45_056, 255, 1096), (106_496, 255, 1256), (73_736, 255, 360)],
}
# The forward and the gradient of heads of 256 x 512 in bfloat16, in the same form.
WIDE = {
    ("key", "scale_operands"): [(57_344, 250, 0), (57_344, 211, 0), (41_008, 228, 0)],
    ("key", "exact_scores"): [(12_288, 255, 8), (12_288, 254, 0), (12_296, 226, 0)],
    ("key", "entering_states"): [(24_576, 232, 0), (51_200, 127, 0), (57_360, 128, 0)],
    ("key", "chunk_outputs"): [(24_576, 168, 0), (49_152, 128, 0), (49_168, 96, 0)],
    ("key", "chunk_states"): [(24_576, 168, 0), (51_200, 126, 0), (57_360, 200, 0)],
    ("key", "wide_value_gradient"): [(16_384, 96, 0), (24_576, 92, 0), (24_592, 76, 0)],
    ("key", "wide_key_gradient"): [(49_152, 255, 32), (65_536, 255, 16), (73_776, 241, 0)],
    ("key", "wide_exact_gradient"): [(20_480, 255, 456), (24_576, 255, 248), (20_488, 224, 0)],
    ("constant", "entering_states"): [(24_584, 224, 0), (196_616, 224, 0), (213_016, 208, 0)],
    ("constant", "chunk_outputs"): [(32_768, 208, 0), (147_456, 243, 0), (147_488, 224, 0)],
    ("head", "head_gate_cumsums"): [(512, 48, 0), (512, 40, 0), (512, 40, 0)],
    ("head", "entering_states"): [(25_600, 224, 0), (50_176, 127, 0), (58_384, 128, 0)],
    ("head", "chunk_outputs"): [(32_768, 208, 0), (65_536, 168, 0), (65_568, 128, 0)],
    ("head", "chunk_states"): [(25_600, 223, 0), (50_176, 128, 0), (58_384, 128, 0)],
    ("head", "wide_value_gradient"): [(24_576, 194, 0), (73_728, 138, 0), (73_760, 94, 0)],
    ("head", "wide_key_gradient"): [(49_152, 255, 40), (81_920, 226, 0), (98_352, 231, 0)],
}
# RWKV-7, heads of 64 in bfloat16, in the same form.
NARROW = {
    ("rwkv7", "along_pairs"): [(16_384, 255, 8), (24_576, 255, 136), (32_768, 255, 336)],
    ("rwkv7", "exact_along_pairs"): [(36_864, 255, 400), (55_296, 255, 392), (32_768, 255, 344)],
    ("rwkv7", "along_outputs"): [(49_152, 223, 0), (100_352, 170, 0), (57_624, 174, 0)],
    ("rwkv7", "along_states"): [(20_480, 132, 0), (73_728, 166, 0), (35_080, 168, 0)],
    ("rwkv7", "along_products"): [(14_336, 255, 8), (40_960, 204, 0), (41_008, 225, 0)],
    ("rwkv7", "along_gradient"): [(44_032, 254, 0), (112_640, 255, 152), (94_216, 255, 240)],
    ("rwkv7", "exact_along_gradient"): [(34_816, 255, 328), (112_640, 255, 1368), (79_880, 255, 700)],
}
# A step of a `StatePool`, in the same form; None where it is refused.
REPLAYED = {
    "key bfloat16 128 recurrent.replay": [(11_264, 128, 0), (11_264, 128, 0), (11_264, 128, 0)],
    "head bfloat16 128 recurrent.replay": [(10_240, 80, 0), (10_240, 80, 0), (10_240, 86, 0)],
    "delta bfloat16 128 recurrent.replay": [(10_240, 96, 0), (10_240, 96, 0), (10_240, 101, 0)],
    "kda bfloat16 128 recurrent.replay/bfloat16": [(11_264, 128, 0), (11_264, 128, 0), (11_264, 129, 0)],
    "key bfloat16 256x512 recurrent.replay": [(22_528, 128, 0), (22_528, 128, 0), (22_528, 128, 0)],
    "rwkv7 bfloat16 64 recurrent.replay": [(10_752, 94, 0), (10_752, 95, 0), (10_752, 96, 0)],
    "key bfloat16 128 recurrent.replay/int8": [(32_768, 104, 0), (24_576, 128, 0), (24_576, 120, 0)],
    "delta bfloat16 128 recurrent.replay/int8": [(32_768, 128, 0), (16_384, 128, 0), (16_384, 128, 8)],
    "kda bfloat16 128 recurrent.replay/float8_e4m3fn": [None, (24_576, 128, 40), (24_576, 128, 48)],
}
# Softmax attention over all keys and over chosen blocks of them, in the same form. Most of what is spilled is spilled by the form
# for rows that are not finite.
SOFTMAX = {
    ("softmax128", "outputs"): [(49_152, 255, 8), (131_072, 245, 0), (132_096, 236, 0)],
    ("softmax128", "query_gradient"): [(49_152, 255, 64), (163_840, 238, 0), (181_248, 138, 0)],
    ("softmax128", "key_gradient"): [(40_960, 252, 0), (115_712, 255, 0), (132_160, 255, 312)],
    ("softmax256", "outputs"): [(69_632, 255, 0), (196_608, 255, 216), (197_152, 255, 128)],
    ("softmax256", "query_gradient"): [(65_536, 255, 0), (196_608, 255, 0), (213_040, 202, 0)],
    ("softmax256", "key_alone"): [(98_304, 255, 16), (197_120, 255, 144), (213_552, 255, 1016)],
    ("softmax256", "value_alone"): [(53_248, 240, 0), (131_456, 255, 104), (131_488, 255, 328)],
    ("softmax128/float32", "outputs"): [(73_728, 255, 120), (73_728, 255, 184), (73_728, 255, 200)],
    ("softmax128/float32", "query_gradient"): [(106_496, 255, 288), (106_496, 255, 328), (106_496, 255, 360)],
    ("softmax128/float32", "key_gradient"): [(98_304, 255, 304), (98_304, 255, 280), (98_304, 255, 264)],
    ("chosen16", "chosen_outputs"): [(70_144, 255, 0), (197_632, 255, 184), (198_176, 255, 144)],
    ("chosen16", "chosen_query_gradient"): [(65_536, 255, 0), (197_632, 254, 0), (214_064, 202, 0)],
    ("chosen16", "chosen_key_alone"): [(98_304, 255, 32), (197_376, 255, 160), (213_808, 255, 800)],
    ("chosen16", "chosen_value_alone"): [(53_248, 244, 0), (131_712, 255, 120), (131_744, 255, 144)],
    ("chosen4", "chosen_outputs"): [(50_176, 255, 8), (133_120, 238, 0), (133_664, 217, 0)],
    ("chosen4", "chosen_query_gradient"): [(49_152, 255, 144), (165_888, 222, 0), (182_320, 156, 0)],
    ("chosen4", "chosen_key_gradient"): [(40_960, 255, 16), (66_324, 228, 0), (82_772, 184, 0)],
}
# A step of it over caches, in the same form.
SOFTMAX_STEP = {
    ("step128", "part_outputs"): [(37_888, 128, 0), (54_272, 125, 0), (54_272, 128, 0)],
    ("step256", "part_outputs"): [(74_752, 198, 0), (107_520, 174, 0), (107_520, 172, 0)],
    ("step128/float32", "part_outputs"): [(86_016, 255, 48), (86_016, 254, 64), (86_016, 254, 64)],
    ("latent512", "part_outputs"): [(93_184, 255, 0), (184_320, 255, 80), (180_776, 255, 88)],
    ("step256-many", "part_outputs"): [(83_968, 245, 0), (131_072, 144, 0), (131_616, 162, 0)],
    ("step256-many-stored", "part_outputs"): [(82_944, 253, 0), (114_688, 184, 0), (114_720, 150, 0)],
    ("latent512-many-stored", "part_outputs"): [(92_672, 255, 128), (92_672, 255, 144), (92_672, 255, 144)],
}
STEPS = (
    "step128",
    "step256",
    "step128/float32",
    "latent512",
    "step256-many",
    "step256-many-stored",
    "latent512-many-stored",
)
SMALL_LIMIT = 101_376  # bytes of shared memory on sm_86, sm_89 and sm_120
# Products of grouped rows, in the same form.
GROUPED = {
    ("prefill", "row_products"): [(32_768, 174, 0), (147_456, 208, 0), (147_472, 172, 0)],
    ("prefill", "row_products^T"): [(32_768, 170, 0), (147_456, 185, 0), (147_472, 162, 0)],
    ("prefill", "group_sums"): [(32_768, 128, 8), (147_456, 217, 0), (147_472, 166, 0)],
    ("prefill/float32", "row_products"): [(32_768, 197, 0), (49_152, 133, 0), (49_160, 116, 0)],
    ("prefill/float32", "row_products^T"): [(32_768, 168, 0), (49_152, 128, 0), (49_160, 111, 0)],
    ("prefill/float32", "group_sums"): [(32_768, 219, 0), (49_152, 188, 0), (49_160, 128, 0)],
}
DECODED = {("decoding", "row_products"): [(30_720, 46, 0), (61_440, 48, 0), (61_440, 56, 0)]}
# The selective scan, in the same form. No kernel spills. 168 registers leave room for three warps on each quarter of a
# multiprocessor.
SELECTIVE = {
    ("N16", "outputs"): [(0, 72, 0), (0, 72, 0), (0, 72, 0)],
    ("N16", "gradient"): [(0, 168, 0), (0, 168, 0), (0, 136, 0)],
    ("packed", "outputs"): [(0, 72, 0), (0, 71, 0), (0, 71, 0)],
    ("packed", "gradient"): [(0, 168, 0), (0, 168, 0), (0, 164, 0)],
    ("N16/float32", "outputs"): [(0, 70, 0), (0, 70, 0), (0, 72, 0)],
    ("N16/float32", "gradient"): [(0, 168, 0), (0, 176, 0), (0, 167, 0)],
    ("N128", "outputs"): [(0, 79, 0), (0, 80, 0), (0, 80, 0)],
    ("N128", "gradient"): [(0, 163, 0), (0, 178, 0), (0, 128, 0)],
    ("prompt", "ends"): [(0, 69, 0), (0, 69, 0), (0, 64, 0)],
    ("prompt", "enter"): [(0, 30, 0), (0, 30, 0), (0, 30, 0)],
    ("prompt", "outputs"): [(0, 77, 0), (0, 78, 0), (0, 82, 0)],
    ("prompt", "gradient"): [(0, 168, 0), (0, 168, 0), (0, 136, 0)],
}
# Its instructions for every token, channel and number of a state, of "prompt". The exponential alone takes 8 cycles.
SELECTIVE_INSTRUCTIONS = {"outputs": 8.0, "ends": 6.5, "gradient": 24.5}
# The delta rule in float32 at widths of 128, in the same form. Its tiles are of 16 rows, and so none is a product of a warpgroup.
# The kernels of key gates out of range spill. The gradient spills less in 8 warps with all rows of a state, but is slower.
FLOAT32 = {
    ("delta", "head_gate_cumsums"): [(256, 30, 0), (512, 40, 0), (512, 40, 0)],
    ("delta", "delta_scores"): [(6_144, 241, 0), (16_384, 213, 0), (18_432, 212, 0)],
    ("delta", "delta_outputs"): [(67_968, 253, 0), (144_128, 255, 8), (144_128, 255, 8)],
    ("delta", "delta_states"): [(67_968, 255, 0), (67_968, 255, 0), (67_968, 255, 32)],
    ("delta", "delta_gradient"): [(38_912, 255, 72), (38_912, 255, 88), (38_912, 255, 80)],
    ("kda", "delta_key_pairs"): [(20_480, 255, 560), (20_480, 255, 648), (20_480, 255, 616)],
    ("kda", "exact_delta_key_pairs"): [(4_096, 255, 96), (4_096, 255, 48), (4_096, 255, 64)],
    ("kda", "delta_outputs"): [(67_712, 248, 0), (67_712, 251, 0), (67_712, 254, 0)],
    ("kda", "delta_states"): [(67_712, 255, 0), (67_712, 252, 0), (67_712, 252, 0)],
    ("kda", "delta_key_gradient"): [(24_576, 255, 256), (24_576, 255, 288), (24_576, 255, 264)],
    ("kda", "exact_delta_key_gradient"): [(45_056, 32, 9384), (45_056, 32, 9168), (45_056, 128, 5040)],
    ("delta-erase", "head_gate_cumsums"): [(256, 30, 0), (512, 40, 0), (512, 40, 0)],
    ("delta-erase", "delta_scores"): [(4_096, 211, 0), (16_384, 216, 0), (18_432, 211, 0)],
    ("delta-erase", "delta_outputs"): [(69_888, 255, 0), (147_968, 255, 16), (147_968, 255, 8)],
    ("delta-erase", "delta_states"): [(67_840, 255, 0), (67_840, 255, 0), (67_840, 255, 24)],
    ("delta-erase", "delta_gradient"): [(47_104, 255, 40), (47_104, 255, 88), (47_104, 255, 64)],
    ("kda-erase", "delta_key_pairs"): [(24_576, 255, 592), (24_576, 255, 712), (24_576, 255, 648)],
    ("kda-erase", "exact_delta_key_pairs"): [(4_096, 255, 96), (4_096, 255, 56), (4_096, 255, 88)],
    ("kda-erase", "delta_outputs"): [(69_632, 251, 0), (69_632, 245, 0), (69_632, 244, 0)],
    ("kda-erase", "delta_states"): [(67_584, 245, 0), (67_584, 252, 0), (67_584, 245, 0)],
    ("kda-erase", "delta_key_gradient"): [(24_576, 255, 256), (24_576, 255, 296), (24_576, 255, 288)],
    ("kda-erase", "exact_delta_key_gradient"): [(45_056, 32, 9536), (45_056, 128, 4848), (45_056, 128, 5000)],
}
# Recurrences without an erasure in float32 at widths of 128, in the same form; wider heads have the same tiles. The programs of
# sm_90 that spill are faster than those with half as many rows, which spill nothing.
FLOAT32_PLAIN = {
    ("head", "head_gate_cumsums"): [(256, 30, 0), (512, 40, 0), (512, 40, 0)],
    ("head", "entering_states"): [(12_544, 168, 0), (66_048, 255, 0), (66_056, 168, 0)],
    ("head", "chunk_outputs"): [(24_576, 255, 0), (81_920, 255, 48), (81_928, 236, 0)],
    ("head", "chunk_states"): [(12_544, 168, 0), (66_048, 255, 16), (66_056, 168, 0)],
    ("head", "wide_value_gradient"): [(6_144, 96, 0), (57_344, 185, 0), (57_352, 168, 0)],
    ("head", "wide_key_gradient"): [(12_288, 254, 0), (65_536, 255, 312), (65_544, 255, 32)],
    ("key", "scale_operands"): [(32_768, 250, 0), (69_632, 255, 128), (65_544, 254, 0)],
    ("key", "exact_scores"): [(14_336, 206, 0), (28_672, 255, 0), (16_392, 222, 0)],
    ("key", "entering_states"): [(12_288, 168, 0), (65_536, 254, 0), (65_544, 211, 0)],
    ("key", "chunk_outputs"): [(16_384, 213, 0), (65_536, 253, 0), (65_544, 204, 0)],
    ("key", "chunk_states"): [(12_288, 168, 0), (65_536, 255, 96), (65_544, 223, 0)],
    ("key", "wide_value_gradient"): [(4_096, 96, 0), (32_768, 117, 0), (32_776, 120, 0)],
    ("key", "wide_key_gradient"): [(12_288, 181, 0), (65_536, 255, 456), (65_544, 255, 128)],
    ("key", "wide_exact_gradient"): [(12_288, 255, 72), (61_440, 255, 1320), (29_184, 255, 120)],
}
# Kernels that consist of products of the tensor cores of their generation.
MULTIPLYING = (
    "outputs",
    "chunk_states",
    "entering_states",
    "chunk_outputs",
    "gradient",
    "wide_key_gradient",
    "wide_value_gradient",
    "delta_outputs",
    "delta_states",
    "delta_gradient",
    "delta_key_gradient",
    "along_outputs",
    "along_states",
    "along_products",
    "along_gradient",
    "query_gradient",
    "key_alone",
    "value_alone",
    "chosen_outputs",
    "chosen_query_gradient",
    "chosen_key_gradient",
    "chosen_key_alone",
    "chosen_value_alone",
    "row_products",
    "row_products^T",
    "group_sums",
)
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


def compiling() -> dict[str, str]:
    """Return the environment of a process that compiles, also where tests of the interpreter run in this one."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def usages(capability: int, *names: str, module: str = "tests.triton_compile") -> dict:
    command = [sys.executable, "-W", "ignore", "-m", module, str(capability), *names]
    done = subprocess.run(command, env=compiling(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    worst: dict = {}  # a kernel may be launched more than once, as in both directions
    for row in map(json.loads, done.stdout.splitlines()):
        other = worst.setdefault((row["kernel"], row["runs"]), row)
        other |= {name: max(row[name], other[name]) for name in ("shared", "stack", "registers")}
    return worst


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets(capability):
    found = usages(
        capability,
        "key bfloat16 128",
        "key/float32 bfloat16 128 chunked.vjp",
        "head bfloat16 128",
        "delta bfloat16 128",
        "kda bfloat16 128",
        "delta-erase bfloat16 128",
        "kda-erase bfloat16 128",
    )
    check_budgets(capability, found, BUDGETS)


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_wide_heads(capability):
    kernels = [f"{gate} bfloat16 256x512 {each}" for gate in ("key", "head") for each in ("chunked", "chunked.vjp")]
    kernels.append("constant bfloat16 256x512 chunked")  # in chunks of its own
    check_budgets(capability, usages(capability, *kernels), WIDE)


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_along_another_key(capability):
    check_budgets(capability, usages(capability, "rwkv7 bfloat16 64"), NARROW)


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_a_step_of_ringed_states(capability):
    place = list(LIMITS).index(capability)
    for runs, budgets in REPLAYED.items():
        if budgets[place] is not None:
            check_budgets(capability, usages(capability, runs), {(runs.split()[0], "replay"): budgets})


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_softmax_attention(capability):
    calls = "softmax128 bfloat16 128", "softmax256 bfloat16 256", "softmax128/float32 float32 128"
    chosen = "chosen16 bfloat16 256", "chosen4 bfloat16 128"
    check_budgets(capability, usages(capability, *calls, *chosen, module="tests.triton_softmax_compile"), SOFTMAX)


def steps_of_softmax(capability: int) -> dict:
    calls = [f"{kind} {'float32' if '/' in kind else 'bfloat16'} {re.findall(r'[0-9]+', kind)[0]}" for kind in STEPS]
    return usages(capability, *calls, module="tests.triton_softmax_compile")


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_a_step_of_softmax_attention(capability):
    check_budgets(capability, steps_of_softmax(capability), SOFTMAX_STEP)


def test_a_step_of_softmax_attention_fits_small_multiprocessors():
    found = steps_of_softmax(89)
    assert len(found) == len(STEPS)
    assert all(usage["shared"] <= SMALL_LIMIT and usage["stack"] <= 128 for usage in found.values()), found


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_grouped_rows(capability):
    found = usages(
        capability,
        "prefill bfloat16 262144",
        "prefill/float32 float32 262144",
        "decoding bfloat16 512",
        module="tests.triton_grouped_compile",
    )
    decoding = {key: row for key, row in found.items() if key[1].startswith("decoding")}
    check_budgets(capability, {key: row for key, row in found.items() if key not in decoding}, GROUPED)
    check_budgets(capability, decoding, DECODED, "mma.sync")  # 16 rows are too few for a product of a warpgroup


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_the_selective_scan(capability):
    calls = "prompt bfloat16 16", "N16 bfloat16 16", "packed bfloat16 16", "N16/float32 float32 16", "N128 bfloat16 128"
    found = usages(capability, *calls, module="tests.triton_selective_compile")
    check_budgets(capability, found, SELECTIVE, products=None)
    for kernel, most in SELECTIVE_INSTRUCTIONS.items():
        assert found[kernel, calls[0]]["per_entry"] <= most


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_of_the_delta_rule_in_float32(capability):
    gates = ("delta", "kda", "delta-erase", "kda-erase")
    check_budgets(capability, usages(capability, *(f"{gate} float32 128" for gate in gates)), FLOAT32, "mma.sync")


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets_without_an_erasure_in_float32(capability):
    calls = [f"{gate} float32 128 {each}" for gate in ("head", "key") for each in ("chunked", "chunked.vjp")]
    check_budgets(capability, usages(capability, *calls), FLOAT32_PLAIN, "mma.sync")


def check_budgets(capability: int, found: dict, budgets: dict, products: str | None = ""):
    """Check what was found. products: those that the kernels of MULTIPLYING consist of; None for no products at all."""
    place = list(LIMITS).index(capability)
    assert {(runs.split()[0], kernel) for kernel, runs in found} == set(budgets)
    for (kernel, runs), row in found.items():
        budget = budgets[runs.split()[0], kernel][place]
        used = row["shared"], row["registers"], row["stack"]
        assert row["shared"] <= LIMITS[capability], f"more shared memory than sm_{capability} has: {kernel}, {used}"
        assert all(x <= most for x, most in zip(used, budget, strict=True)), (kernel, runs, used, budget)
        if kernel in MULTIPLYING and products is not None and " float32 " not in runs:
            assert (products or PRODUCTS[capability]) in row["matrix"], (kernel, runs, row["matrix"])


JITTED = """
import jax, jax.numpy as jnp
from jax._src.pallas.triton import gpu_info
import glax
from tests.tooling.lowered_programs import device

ask = gpu_info.get_gpu_info
def of_the_target():  # the threads that compile ahead see no abstract device
    with device("cuda"):
        return ask()
gpu_info.get_gpu_info = of_the_target

x, g = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 256, 2), jnp.float32)
with device("cuda"):
    run = jax.jit(lambda q, g: glax.simple_gla(q, q, q, g, platform="triton").output)
    text = run.trace(x, g).lower(lowering_platforms=("cuda",)).as_text()
assert "triton_kernel_call" in text, text[:2000]
"""


def test_a_jitted_call_lowers():
    """JAX asks jax-triton which operands are live. jax-triton 0.4.1 alone does not answer JAX 0.12."""
    subprocess.run([sys.executable, "-c", JITTED], check=True, env=compiling() | {"JAX_PLATFORMS": "cpu"})
