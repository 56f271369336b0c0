"""Codes and scales against the packages that define each dialect: bytes equal on a million values.

Half of the values are Gaussian, half lie at rounding midpoints or an ulp beside them; the rows'
maxima sweep all BF16 mantissas, for a single one can agree by luck. What is not equal, and why, is
docs/formats/dialects.md.
"""
import os
import pathlib
import subprocess

import pytest

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

TOOL = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")) / "quantize_tool"
if not TOOL.exists():
    pytest.skip(f"{TOOL} is not built", allow_module_level=True)

ROWS, COLS = 512, 2048  # 2^20 values
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def tool(*args, data):
    done = subprocess.run([TOOL, *map(str, args)], input=data, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.uint8)


def quantize(preset, x, block=16, over="per-token"):
    kind = "f32" if x.dtype == np.float32 else "bf16"
    rows, cols = x.shape
    out = tool("quantize", preset, kind, over, rows, cols, data=x.tobytes())
    codes, scales, rest = np.split(out, [rows * cols // 2, rows * cols // 2 + rows * cols // block])
    return (codes.reshape(rows, cols // 2), scales.reshape(rows, cols // block),
            np.frombuffer(rest.tobytes(), np.float32))


def e4m3_values():
    return np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def values(dtype, exponents=(-8, 8), block=16, seed=1):
    """[ROWS, COLS]; row r's amax has the BF16 mantissa r % 128."""
    rng = np.random.default_rng(seed)
    blocks = COLS // block
    amax = (1 + np.arange(ROWS) % 128 / 128) * 2.0 ** rng.integers(*exponents, ROWS)
    spread = 2.0 ** -rng.gamma(1.5, 1.5, (ROWS, blocks, 1))
    x = rng.standard_normal((ROWS, blocks, block)) * spread * amax[:, None, None] / 4
    # Midpoints of blocks whose scale is s, with the element that asks for it.
    s = rng.choice(e4m3_values()[1:], (ROWS, blocks)) * (amax / 2688)[:, None]
    near = rng.choice(MIDPOINTS, (ROWS, blocks, block)) * s[..., None]
    near *= rng.choice([-1, 1], near.shape)
    near[..., 0] = 6 * s
    x = np.where((np.arange(blocks) % 2)[None, :, None] == 1, near, x)
    x = np.clip(x, -amax[:, None, None], amax[:, None, None]).astype(dtype)
    ulps = np.uint16 if dtype == ml_dtypes.bfloat16 else np.uint32
    bits = x.view(ulps)
    bits += rng.integers(0, 3, bits.shape, ulps)
    bits -= np.where(bits & ulps(0x7FFF_FFFF & np.iinfo(ulps).max >> 1) > 0, ulps(1), ulps(0))
    x = bits.view(dtype)
    x[np.abs(x.astype(np.float32)) > amax[:, None, None]] = 0
    x[:, 0, 0] = amax * rng.choice([-1, 1], ROWS)
    x[:, 5] = 0
    x[:, 7, ::3] = -0.0
    x[3:9, 8:20] *= dtype(2.0 ** -20)  # far below the smallest scale
    return x.reshape(ROWS, COLS)


def rows_amax(x):
    return np.abs(x.astype(np.float32)).max(-1, keepdims=True)


def same(ours, theirs, what):
    different = np.flatnonzero(ours.ravel() != theirs.ravel())
    assert different.size == 0, (
        f"{what}: {different.size} of {ours.size} differ, first at {different[:4]}: "
        f"{ours.ravel()[different[:4]]} and {theirs.ravel()[different[:4]]}")


DTYPES = [ml_dtypes.bfloat16, np.float32]
RANGES = [(-8, 8), (-60, -40), (30, 60)]


# --- casts against ml-dtypes -----------------------------------------------------------------

def cast_inputs():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    rng = np.random.default_rng(2)
    some = rng.integers(0, 1 << 32, 1 << 20, np.uint64).astype(np.uint32).view(np.float32)
    edges = np.concatenate([
        np.concatenate([np.nextafter(m, np.float32(d), dtype=np.float32) for d in (0, 1e9)] + [m])
        for m in [np.float32(MIDPOINTS), np.float32(e4m3_values()),
                  np.float32((e4m3_values()[1:] + e4m3_values()[:-1]) / 2)]])
    x = np.concatenate([every, some, edges, -edges])
    return x[~np.isnan(x)]


def test_cast_e2m1_equals_ml_dtypes():
    x = cast_inputs()
    ours = tool("cast", "e2m1", data=x.tobytes())
    theirs = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    same(ours, np.where(theirs == 8, 0, theirs), "e2m1")


def test_cast_e4m3_equals_ml_dtypes():
    x = np.clip(cast_inputs(), -448, 448)
    same(tool("cast", "e4m3", data=x.tobytes()),
         x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), "e4m3")


def test_cast_bf16_equals_ml_dtypes():
    x = cast_inputs()
    ours = np.frombuffer(tool("cast", "bf16", data=x.tobytes()).tobytes(), np.uint16)
    same(ours, x.astype(ml_dtypes.bfloat16).view(np.uint16), "bf16")


# --- lockstep and te against their formulas, written with ml-dtypes' casts --------------------

def pack(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
def test_lockstep_equals_exact_quotients(dtype, exponents):
    x = values(dtype, exponents)
    wide = x.astype(np.float64).reshape(ROWS, -1, 16)
    n = np.ceil(np.log2(rows_amax(x).astype(np.float64) / 2688))
    s = (np.abs(wide).max(-1) / 6 / 2.0**n).astype(np.float32)
    s = s.astype(ml_dtypes.float8_e4m3fn)
    scale = (s.astype(np.float64) * 2.0**n)[..., None]
    z = np.where(scale > 0, wide / np.where(scale > 0, scale, 1), 0)
    m = sum((np.abs(z) >= t if i % 2 else np.abs(z) > t).astype(np.uint8)
            for i, t in enumerate(MIDPOINTS))
    codes = np.where((z < 0) & (m > 0), m | 8, m).astype(np.uint8)
    ours = quantize("lockstep", x)
    same(ours[1], s.view(np.uint8), "scales")
    same(ours[0], pack(codes.reshape(ROWS, COLS)), "codes")
    same(ours[2], np.float32(2.0**n), "2^n")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
def test_te_equals_its_formula(dtype, exponents):
    x = values(dtype, exponents)
    f = np.float32
    wide = x.astype(f).reshape(ROWS, -1, 16)
    encode = np.minimum(f(2688) / rows_amax(x), np.finfo(f).max)
    s = np.clip(np.abs(wide).max(-1) * (encode * f(1 / f(6))), 0, 448)
    s = s.astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.minimum(f(1) / (s.astype(f) * (f(1) / encode)), np.finfo(f).max)
        z = wide * multiplier[..., None]
    codes = z.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    ours = quantize("te", x)
    same(ours[1], s.view(np.uint8), "scales")
    same(ours[0], pack(codes.reshape(ROWS, COLS)), "codes")
    same(ours[2], rows_amax(x).ravel(), "amax")


# --- four over six -----------------------------------------------------------------------------

def four_over_six_scales(x):
    """[ROWS, blocks] E4M3 of both maps, amax over 6 and over 4, and 2^n [ROWS, 1]."""
    amax = np.abs(x.astype(np.float64)).reshape(ROWS, -1, 16).max(-1)
    n = 2.0**np.ceil(np.log2(rows_amax(x).astype(np.float64) / 1536))
    return [(amax / to / n).astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for to in (6, 4)], n


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("exponents", RANGES)
def test_four_over_six_equals_its_definition(metric, exponents):
    x = values(ml_dtypes.bfloat16, exponents)
    wide = x.astype(np.float64).reshape(ROWS, -1, 16)
    candidates, n = four_over_six_scales(x)
    grid = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
    losses, codes = [], []
    for s in candidates:
        scale = (s.astype(np.float64) * n)[..., None]
        z = np.where(scale > 0, wide / np.where(scale > 0, scale, 1), 0)
        m = sum((np.abs(z) >= t if i % 2 else np.abs(z) > t).astype(np.uint8)
                for i, t in enumerate(MIDPOINTS))
        lost = np.abs(grid[m] * scale - np.abs(wide))
        losses.append(lost if metric == "mae" else lost**2)
        codes.append(np.where((z < 0) & (m > 0), m | 8, m).astype(np.uint8))
    # What both maps make 0 loses the same, and would drown the rest of an exact sum.
    four = (losses[1] - losses[0]).sum(-1) < 0
    s = np.where(four, candidates[1].view(np.uint8), candidates[0].view(np.uint8))
    ours = quantize(f"lockstep/{metric}", x)
    assert 0.1 < four.mean() < 0.9
    same(ours[1], s, "scales")
    same(ours[0], pack(np.where(four[..., None], codes[1], codes[0]).reshape(ROWS, COLS)), "codes")
    same(ours[2], np.float32(n), "2^n")


@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_four_over_six_chooses_as_its_authors_do(metric):
    """Their reference under a power of two. They reach amax / 4 by way of amax / 6, and sum in FP32:
    near a tie of E4M3 or of the two losses it may choose otherwise."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("fouroversix.quantize.pytorch.reference")
    rule = getattr(pytest.importorskip("fouroversix.utils").ScaleRule, metric)
    x = values(ml_dtypes.bfloat16)
    candidates, n = four_over_six_scales(x)
    blocks = torch.from_numpy((x.astype(np.float32) / np.float32(n)).reshape(-1, 16))
    amax = torch.tensor(1536.0)
    six, scales_6 = theirs.quantize_to_nvfp4(blocks, amax, scale_rule=rule)
    four, scales_4 = theirs.quantize_to_nvfp4(blocks, amax, scale_rule=rule,
                                              scale_expansion_factor=1.5)
    _, chosen = theirs.select_fouroversix(blocks, six, scales_6, four, scales_4, amax,
                                          scale_rule=rule)
    chosen = bytes_of(chosen).reshape(ROWS, -1)
    ours = quantize(f"lockstep/{metric}", x)[1]
    agree = bytes_of(scales_4).reshape(ROWS, -1) == candidates[1].view(np.uint8)
    assert agree.mean() > 0.95
    same_choice = (ours == chosen) & agree
    assert same_choice[:, 0::2].sum() > 0.9995 * agree[:, 0::2].sum()  # Gaussian blocks
    assert same_choice.sum() > 0.99 * agree.sum()  # at midpoints a rounded reciprocal decides


# --- torchao -----------------------------------------------------------------------------------

def torch_of(x):
    torch = pytest.importorskip("torch")
    if x.dtype == np.float32:
        return torch.from_numpy(x.copy())
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)


def bytes_of(tensor):
    torch = pytest.importorskip("torch")
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
def test_torchao_nvfp4(dtype, exponents):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = values(dtype, exponents)
    amax = torch_of(rows_amax(x))
    scales, codes = nvfp4.nvfp4_quantize(torch_of(x), 16, nvfp4.per_tensor_amax_to_scale(amax))
    ours = quantize("torchao", x)
    same(ours[1], bytes_of(scales).reshape(ROWS, -1), "scales")
    same(ours[0], bytes_of(codes), "codes")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("exponents", RANGES)
def test_torchao_mxfp4(dtype, mode, exponents):
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = values(dtype, exponents, block=32)
    scales, codes = mx.to_mx(torch_of(x), torch.float4_e2m1fn_x2, 32,
                             getattr(mx.ScaleCalculationMode, mode.upper()))
    codes = bytes_of(codes).reshape(ROWS, -1)
    ours = quantize(f"mx-{mode}", x, 32, "none")
    scales = bytes_of(scales).reshape(ROWS, -1)
    if mode == "rceil" and dtype == np.float32:
        # Its FP32 log2 takes an amax an ulp above 6 * 2^k for 6 * 2^k.
        amax = rows_amax(x.reshape(ROWS, -1, 32))[..., 0].astype(np.float64)
        level = np.log2(np.where(amax > 0, amax, 6) / 6)
        clear = (level - np.floor(level) > 1e-5) | (level == np.floor(level))
        assert clear.mean() > 0.99
        same(ours[1][clear], scales[clear], "scales")
        clear = np.repeat(clear, 16, axis=1)
        return same(ours[0][clear], without_negative_zero(codes)[clear], "codes")
    same(ours[1], scales, "scales")
    same(ours[0], without_negative_zero(codes), "codes")


# --- MXFP8 and FP8 ------------------------------------------------------------------------------

def wide(preset, x, bands, blocks):
    """Codes a byte each, and scales, of elements that are E4M3."""
    kind = "f32" if x.dtype == np.float32 else "bf16"
    rows, cols = x.shape
    out = tool("quantize", preset, kind, "none", rows, cols, data=x.tobytes())
    codes, scales, _ = np.split(out, [rows * cols, rows * cols + bands * blocks])
    return codes.reshape(rows, cols), scales.reshape(bands, blocks)


def e4m3_midpoints():
    v = e4m3_values()
    return (v[1:] + v[:-1]) / 2


def fp8_values(dtype, exponents, seed=3):
    """As values(), with midpoints of E4M3 under powers of two."""
    x = values(dtype, exponents, block=32, seed=seed).astype(np.float64)
    rng = np.random.default_rng(seed)
    level = 2.0 ** np.floor(np.log2(rows_amax(x.astype(np.float32)).astype(np.float64) / 448))
    near = rng.choice(e4m3_midpoints(), x.shape) * rng.choice([-1, 1], x.shape) * level
    pick = rng.integers(0, 3, x.shape) == 0
    return np.where(pick & (np.abs(near) <= rows_amax(x.astype(np.float32))), near, x).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("exponents", RANGES)
def test_torchao_mxfp8(dtype, mode, exponents):
    if dtype == np.float32 and exponents != RANGES[0]:
        pytest.skip("the ends are tried in BF16")
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = fp8_values(dtype, exponents)
    scales, codes = mx.to_mx(torch_of(x), torch.float8_e4m3fn, 32,
                             getattr(mx.ScaleCalculationMode, mode.upper()))
    codes = bytes_of(codes).reshape(ROWS, COLS)
    scales = bytes_of(scales).reshape(ROWS, -1)
    ours = wide(f"mxfp8-{mode}", x, ROWS, COLS // 32)
    clear = np.ones(scales.shape, bool)
    if mode == "rceil" and dtype == np.float32:
        # Its FP32 logarithm takes an amax an ulp above 448 * 2^k for 448 * 2^k.
        amax = rows_amax(x.reshape(ROWS, -1, 32))[..., 0].astype(np.float64)
        level = np.log2(np.where(amax > 0, amax, 448) / 448)
        clear = (level - np.floor(level) > 1e-5) | (level == np.floor(level))
        assert clear.mean() > 0.99
    same(ours[1][clear], scales[clear], "scales")
    clear = np.repeat(clear, 32, axis=1)
    same(ours[0][clear], np.where(codes == 0x80, 0, codes)[clear], "codes")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
@pytest.mark.parametrize("preset,rows,cols", [("fp8-row", 40, 2048), ("fp8", 512, 2048),
                                              ("fp8", 300, 200), ("fp8", 5, 48)])
def test_fp8_equals_ml_dtypes_under_powers_of_two(dtype, exponents, preset, rows, cols):
    x = np.ascontiguousarray(fp8_values(dtype, exponents)[:rows, :cols])
    high = 1 if preset == "fp8-row" else 128
    bands, blocks = -(-rows // high), -(-cols // 128)
    ours = wide(preset, x, bands, blocks)
    f64 = x.astype(np.float64)
    for i in range(bands):
        for j in range(blocks):
            at = np.s_[i * high:(i + 1) * high, j * 128:(j + 1) * 128]
            amax = np.abs(f64[at]).max()
            if amax == 0:
                assert ours[1][i, j] == 0 and not ours[0][at].any()
                continue
            mantissa, exponent = np.frexp(amax / 448)  # exact: ceil(log2) from the parts
            e = int(exponent) - (mantissa == 0.5)
            assert ours[1][i, j] == e + 127
            theirs = np.clip(f64[at] / 2.0**e, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            theirs = theirs.view(np.uint8)
            same(ours[0][at], np.where(theirs == 0x80, 0, theirs), f"codes of block {i}, {j}")


def without_negative_zero(packed):
    packed = np.where(packed & 0x0F == 0x08, packed & 0xF0, packed)
    return np.where(packed & 0xF0 == 0x80, packed & 0x0F, packed)


@pytest.mark.parametrize("shape", [(1, 1), (127, 3), (128, 4), (129, 5), (300, 17)])
def test_torchao_swizzle(shape):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    torch = pytest.importorskip("torch")
    scales = np.random.default_rng(3).integers(1, 127, shape).astype(np.uint8)
    theirs = utils.to_blocked(torch.from_numpy(scales)).numpy()
    same(tool("swizzle", "128x4", *shape, data=scales.tobytes()), theirs, "swizzle")


# --- compressed-tensors -------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
def test_compressed_tensors_nvfp4(dtype, exponents):
    torch = pytest.importorskip("torch")
    ct = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    packer = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    x = values(dtype, exponents)
    args = ct.preset_name_to_scheme("NVFP4", ["Linear"]).weights
    ours = quantize("compressed-tensors", x)
    wide = torch_of(x).float()
    zero = torch.zeros(1)
    for r in range(0, ROWS):
        row = wide[r:r + 1]
        amax = row.reshape(1, -1, 16).abs().amax(-1)
        encode = helpers.generate_gparam(zero, row.abs().max())
        scales, _ = helpers.calculate_qparams(-amax, amax, args, encode)
        codes = packer.quantize_and_pack_fp4(row, scales, encode)
        same(ours[2][r:r + 1], encode.numpy(), "global")
        same(ours[1][r], bytes_of(scales.to(torch.float8_e4m3fn))[0], f"scales of row {r}")
        same(ours[0][r], bytes_of(codes)[0], f"codes of row {r}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
def test_compressed_tensors_mxfp4(dtype, exponents):
    torch = pytest.importorskip("torch")
    ct = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    packer = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    mx = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    x = values(dtype, exponents, block=32)
    args = ct.preset_name_to_scheme("MXFP4", ["Linear"]).weights
    wide = torch_of(x).float()
    amax = wide.reshape(ROWS, -1, 32).abs().amax(-1)
    amax[amax == 0] = 2.0**-20  # its scale of a zero block is 1, ours the smallest
    exponent = helpers.generate_mx_scales(amax)
    codes = packer.quantize_and_pack_fp4(wide, 2.0**(exponent - 127), group_size=32)
    ours = quantize("mx-even", x, 32, "none")
    live = rows_amax(x.reshape(ROWS, -1, 32))[..., 0] > 0
    same(ours[1][live], exponent.to(torch.uint8).numpy()[live], "scales")
    same(ours[0], without_negative_zero(bytes_of(codes)), "codes")


# --- ModelOpt -----------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", RANGES)
def test_modelopt_nvfp4(dtype, exponents):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    x = values(dtype, exponents)
    decode = torch_of(rows_amax(x)) / (6.0 * 448.0)
    scales, _ = qtensor.NVFP4QTensor.get_weights_scaling_factor(torch_of(x), 16, decode)
    codes, _, _ = qtensor.NVFP4QTensor.quantize(torch_of(x), 16, scales, decode)
    ours = quantize("modelopt", x)
    same(ours[2], decode.numpy().ravel(), "global")
    same(ours[1], bytes_of(scales).reshape(ROWS, -1), "scales")
    same(ours[0], bytes_of(codes._quantized_data), "codes")


@pytest.mark.parametrize("preset", ["modelopt", "torchao", "compressed-tensors"])
def test_dequantized_values_equal(preset):
    torch = pytest.importorskip("torch")
    x = values(ml_dtypes.bfloat16)
    codes, scales, whole = quantize(preset, x)
    ours = np.frombuffer(tool("dequantize", preset, "per-token", ROWS, COLS,
                              data=codes.tobytes() + scales.tobytes() + whole.tobytes()), np.uint8)
    ours = np.frombuffer(ours.tobytes(), np.float32).reshape(ROWS, COLS)
    s = torch.from_numpy(scales.copy()).view(torch.float8_e4m3fn).float()
    g = torch.from_numpy(whole.copy())[:, None]
    if preset == "modelopt":
        qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
        packed = qtensor.NVFP4QTensor((ROWS, COLS), torch.float32, torch.from_numpy(codes.copy()))
        theirs = packed.dequantize(torch.float32, scale=s, double_scale=g, block_sizes={-1: 16})
    else:
        forward = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
        q = forward.unpack_fp4_from_uint8(torch.from_numpy(codes.copy()), ROWS, COLS,
                                          dtype=torch.float32)
        factor = s * g if preset == "torchao" else s / g
        theirs = q * factor.repeat_interleave(16, 1)
    same(ours, theirs.numpy(), "values")


# --- gguf ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("exponents", RANGES)
def test_gguf_mxfp4(exponents):
    quants = pytest.importorskip("gguf.quants")
    x = values(ml_dtypes.bfloat16, exponents, block=32)
    theirs = quants.MXFP4.quantize_blocks(x.astype(np.float32).reshape(-1, 32))
    codes, scales, _ = quantize("ggml-mxfp4", x, 32, "none")
    ours = tool("ggml", "ggml-mxfp4", ROWS, COLS, data=codes.tobytes() + scales.tobytes())
    same(ours, theirs, "blocks")


def test_gguf_nvfp4():
    """gguf has the cast of the scale and the decoder; the nearest value is found by trying all."""
    quants = pytest.importorskip("gguf.quants")
    x = values(ml_dtypes.bfloat16, (-6, 9))
    blocks = x.astype(np.float32).reshape(-1, 16)
    scale = quants.NVFP4.fp32_to_ue4m3(np.abs(blocks).max(-1) / np.float32(6))
    codes, scales, _ = quantize("ggml", x, 16, "none")
    same(scales.ravel(), scale, "scales")
    doubled = np.array(quants.NVFP4.kvalues, np.float32)
    d = quants.NVFP4.ue4m3_to_fp32(scale)
    best = np.argmin(np.abs(d[:, None, None] * doubled - blocks[..., None]), -1).astype(np.uint8)
    same(codes, pack(best.reshape(ROWS, COLS)), "codes")
    packed = tool("ggml", "ggml", ROWS, COLS, data=codes.tobytes() + scales.tobytes())
    theirs = quants.NVFP4.dequantize_blocks(packed.reshape(-1, 36).copy())
    ours = tool("dequantize", "ggml", "none", ROWS, COLS,
                data=codes.tobytes() + scales.tobytes() + np.ones(ROWS, np.float32).tobytes())
    same(np.frombuffer(ours.tobytes(), np.float32), theirs.ravel(), "values")
