//! Attention over packed documents, forward and backward, and decode over a KV cache.

use std::cell::LazyCell;
use std::ops::Range;

use lockstep_core::DType;
use lockstep_device::Queue;
use lockstep_device::cuda::GpuError;

use super::harness::{Case, Harness, Operands, tolerance};
use crate::attention::{self, BackwardArgs, DecodeArgs, ForwardArgs, Heads, KvCache, TensorCores, reference};
use crate::dropout::{self, Mask, Site};

/// Lengths at the edges of tiles of 32, 64 and 128 rows.
const EDGES: [usize; 9] = [1, 2, 0, 31, 65, 63, 64, 127, 129];
const LONG: [usize; 10] = [1, 2, 63, 64, 65, 0, 127, 129, 300, 1000];

/// The number of query heads, of key-value heads, and the head width.
type Shape = (usize, usize, usize);

pub(super) fn run(harness: &Harness, dtype: DType) -> Result<(), GpuError> {
    // The reference is slow for long documents: only fast devices get them.
    let quick = matches!(harness.queue, Queue::Cuda(_));
    let edges = if quick { &EDGES[..] } else { &EDGES[..5] };
    // Rows at multiples of 16 bytes, and at other addresses.
    let shapes = [
        ((2, 2, 64), 8),
        ((8, 1, 64), 0),
        ((4, 1, 128), 8),
        ((8, 1, 128), 0),
        ((2, 1, 80), 0),
        ((4, 2, 96), 8),
        ((2, 1, 256), 0),
        ((3, 3, 48), 8),
        ((4, 1, 16), 0),
        ((1, 1, 144), 0),
        ((6, 2, 20), 1),
        ((2, 1, 7), 0),
        ((2, 2, 64), 3),
        ((1, 1, 320), 1),
    ];
    for (shape, pad) in shapes {
        for window in [None, Some(50)] {
            both(harness, dtype, shape, edges, window, pad, 0.0)?;
        }
    }
    for window in [Some(1), Some(2), Some(64), Some(128), Some(1000)] {
        both(harness, dtype, (2, 1, 64), edges, window, 8, 0.0)?;
    }
    // Scores that hardly differ, and scores where one key dominates.
    for (shape, pad) in [((2, 1, 64), 8), ((2, 1, 128), 0), ((2, 1, 80), 0), ((4, 2, 20), 1)] {
        for spread in [1e-3, 30.0] {
            both_spread(harness, dtype, shape, edges, None, pad, 0.0, spread)?;
        }
    }
    for (shape, rate) in [((2, 1, 64), 0.1), ((4, 2, 20), 0.6), ((1, 1, 160), 0.3)] {
        both(harness, dtype, shape, edges, None, 0, rate)?;
        both(harness, dtype, shape, edges, Some(50), 1, rate)?;
    }
    if quick {
        for (shape, window) in [((2, 1, 64), None), ((1, 1, 128), Some(200)), ((1, 1, 20), None)] {
            both(harness, dtype, shape, &LONG, window, 0, 0.0)?;
        }
        let many: Vec<usize> = (0..400).map(|i| i % 13).collect();
        both(harness, dtype, (2, 2, 64), &many, None, 0, 0.0)?;
    }
    both(harness, dtype, (2, 1, 64), &[0, 0], None, 0, 0.0)?;

    for (shape, window, rate) in [
        ((2, 1, 64), None, 0.0),
        ((2, 1, 128), Some(50), 0.0),
        ((1, 1, 256), None, 0.0),
        ((2, 1, 20), None, 0.2),
    ] {
        contract(harness, dtype, shape, window, rate)?;
    }
    for shape in [(8, 1, 64), (4, 1, 128), (6, 2, 20), (2, 2, 96), (12, 1, 256), (1, 1, 512)] {
        for (window, page_tokens) in [(None, 64), (Some(50), 64), (None, 128)] {
            decode(harness, dtype, shape, window, page_tokens)?;
        }
    }
    Ok(())
}

fn heads_of((num_q, num_kv, width): Shape, window: Option<usize>) -> Heads {
    Heads { num_q, num_kv, width, scale: 1.0 / (width as f32).sqrt(), window }
}

fn bounds_of(lens: impl IntoIterator<Item = usize>) -> Vec<u32> {
    let ends = lens.into_iter().scan(0, |end, len| {
        *end += len as u32;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

/// Columns of the fused q, k, v, or of their gradients.
fn columns(heads: &Heads) -> [Range<usize>; 3] {
    let (q, kv) = (heads.num_q * heads.width, heads.num_kv * heads.width);
    [0..q, q..q + kv, q + kv..q + 2 * kv]
}

/// The parts of a fused matrix, each contiguous.
fn split(heads: &Heads, fused: &[f64]) -> [Vec<f64>; 3] {
    let all = columns(heads);
    let row = all[2].end;
    all.map(|part| fused.chunks_exact(row).flat_map(|row| &row[part.clone()]).copied().collect())
}

/// Scratch for forward and backward on the case's queue, in f32 elements.
fn scratch_elems(case: &Case, heads: &Heads, lens: &[usize]) -> usize {
    let bytes = match case.queue {
        Queue::Cpu(_) => {
            let longest = lens.iter().copied().max().unwrap_or(0);
            attention::scratch_bytes(case.queue.num_threads(), longest, heads.width)
        }
        Queue::Cuda(_) => attention::cuda_scratch_bytes(lens.iter().sum(), heads.num_q, heads.width),
    };
    bytes.0 as usize / 4
}

/// One pack of documents: fused rows of q, k, v and rows of the output's gradient, the dropout rate, and the sample
/// that each document is.
struct Pack<'a> {
    heads: Heads,
    lens: &'a [usize],
    fused: &'a [f32],
    dout: &'a [f32],
    pad: usize,
    rate: f64,
    samples: &'a [u32],
    cores: TensorCores,
}

/// A pack's inputs as they are stored, and everything that attention writes.
struct Results {
    qkv: Vec<f64>,
    dout: Vec<f64>,
    out: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

impl Pack<'_> {
    fn mask<'m>(&self, case: &'m Case<'_>) -> Mask<'m> {
        let samples = case.input_u32(self.samples);
        Mask { rate: self.rate, seed: 11, step: 5, layer: 2, site: Site::Probabilities, samples }
    }

    /// Runs forward, then backward.
    fn run(&self, case: &Case, dtype: DType) -> Results {
        let Pack { heads, lens, pad, .. } = *self;
        let [q_cols, k_cols, v_cols] = columns(&heads);
        let (tokens, cols) = (lens.iter().sum::<usize>(), v_cols.end);
        let qkv = case.padded(self.fused, cols, pad, dtype);
        let dqkv = case.padded_output(tokens, cols, pad, dtype);
        let dout = case.padded(self.dout, q_cols.len(), pad, dtype);
        let out = case.padded_output(tokens, q_cols.len(), pad, dtype);
        let lse = case.output(tokens * heads.num_q, DType::F32);
        let call = ForwardArgs {
            heads,
            out: out.mat,
            lse,
            q: qkv.mat.columns(q_cols.start, q_cols.len()),
            k: qkv.mat.columns(k_cols.start, k_cols.len()),
            v: qkv.mat.columns(v_cols.start, v_cols.len()),
            cu_seqlens: case.input_u32(&bounds_of(lens.iter().copied())),
            dropout: (self.rate > 0.0).then(|| self.mask(case)),
            scratch: case.output(scratch_elems(case, &heads, lens), DType::F32),
        };
        attention::forward_on(case.queue, call, self.cores);
        let [dq, dk, dv] = [q_cols, k_cols, v_cols].map(|part| dqkv.mat.columns(part.start, part.len()));
        let call = BackwardArgs { dq, dk, dv, dout: dout.mat, forward: call };
        attention::backward_on(case.queue, call, self.cores);
        Results {
            qkv: case.padded_values(&qkv),
            dout: case.padded_values(&dout),
            out: case.padded_values(&out),
            lse: case.values(lse),
            dqkv: case.padded_values(&dqkv),
        }
    }
}

/// Forward and backward of one pack, on the best tensor cores and on those of sm_80.
fn both(
    harness: &Harness,
    dtype: DType,
    shape: Shape,
    lens: &[usize],
    window: Option<usize>,
    pad: usize,
    rate: f64,
) -> Result<(), GpuError> {
    both_spread(harness, dtype, shape, lens, window, pad, rate, 1.0)
}

/// With scores of magnitude `spread`.
#[allow(clippy::too_many_arguments)]
fn both_spread(
    harness: &Harness,
    dtype: DType,
    shape: Shape,
    lens: &[usize],
    window: Option<usize>,
    pad: usize,
    rate: f64,
    spread: f32,
) -> Result<(), GpuError> {
    both_on(harness, dtype, shape, lens, window, pad, rate, spread, TensorCores::Best)?;
    let cores = matches!(harness.queue, Queue::Cuda(_)) && dtype != DType::F32 && shape.2.is_multiple_of(16);
    if cores && rate == 0.0 {
        both_on(harness, dtype, shape, lens, window, pad, rate, spread, TensorCores::Sm80)?;
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn both_on(
    harness: &Harness,
    dtype: DType,
    shape: Shape,
    lens: &[usize],
    window: Option<usize>,
    pad: usize,
    rate: f64,
    spread: f32,
    cores: TensorCores,
) -> Result<(), GpuError> {
    let heads = heads_of(shape, window);
    let (tokens, bounds) = (lens.iter().sum::<usize>(), bounds_of(lens.iter().copied()));
    let (num_q, num_kv, width) = shape;
    let (docs, longest) = (lens.len(), lens.iter().max().unwrap_or(&0));
    let name = format!(
        "attention, {dtype}, heads {num_q}/{num_kv}×{width}, {docs} documents of up to {longest}, window {window:?}, \
         padding {pad}, dropout {rate}, tensor cores {cores:?}, score magnitude {spread}"
    );
    // A score of magnitude s has an error of about s roundings of f32, and its exponential has that relative error.
    let tolerance = tolerance(dtype).max(f64::from(spread) * 1e-6);
    harness.case(name, tolerance, |case| {
        let [q_cols, _, v_cols] = columns(&heads);
        // Queries and keys each have the square root of the spread.
        let factor = |i: usize| if i % v_cols.end < v_cols.start { spread.sqrt() } else { 1.0 };
        let fused = case.normal_values(tokens * v_cols.end);
        let fused: Vec<f32> = fused.iter().enumerate().map(|(i, x)| x * factor(i)).collect();
        let dout = case.normal_values(tokens * q_cols.len());
        let samples = case.indices(docs, 1 << 20);
        let pack = Pack { heads, lens, fused: &fused, dout: &dout, pad, rate, samples: &samples, cores };
        let Results { qkv, dout, out, lse, dqkv } = pack.run(case, dtype);

        let mask = pack.mask(case);
        let factor = |doc: usize, head: usize, i: usize, j: usize| match rate > 0.0 {
            true => dropout::reference::factor(&mask, samples[doc], head as u32, i, j),
            false => 1.0,
        };
        let [q, k, v] = split(&heads, &qkv);
        let want = LazyCell::new(|| reference::forward_dropped(heads, &bounds, &q, &k, &v, &factor));
        let slopes =
            LazyCell::new(|| reference::backward_dropped(heads, &bounds, [&q, &k, &v], &dout, &factor));
        // Values of opposite signs cancel; measure a row against a tenth of their norm.
        let tenth = 0.1 * (width as f64).sqrt();
        case.compare_rows("out", width, (0.0, |_| tenth), out, || want.0.clone());
        case.compare_at("lse", lse.len(), (lse.len() as f64).sqrt(), lse, || want.1.clone());
        // The gradients of a query that sees one key are differences of equal numbers: dot products over the width of a
        // head with rounded results of forward. A row is measured against their magnitude; the whole against that of
        // ordinary rows, unless sharp scores leave most queries with one key.
        let unit = f64::from(heads.scale * spread.sqrt());
        let of_row = 0.5 * unit * width as f64 / (1.0 - rate);
        let size = |values: &[f64]| match spread > 1.0 {
            true => of_row * (values.len() as f64 / width as f64).sqrt(),
            false => unit * (values.len() as f64).sqrt(),
        };
        let [dq, dk, dv] = split(&heads, &dqkv);
        case.compare_rows("dq", width, (size(&q), |_| of_row), dq, || slopes.dq.clone());
        case.compare_rows("dk", width, (size(&k), |_| of_row), dk, || slopes.dk.clone());
        case.compare("dv", width, dv, || slopes.dv.clone());
    })
}

/// The row contract, bit for bit: a document alone has the same results as in a pack, and the rows of its first tokens
/// the same as in the whole, except for dk and dv, which sum over later tokens.
fn contract(
    harness: &Harness,
    dtype: DType,
    shape: Shape,
    window: Option<usize>,
    rate: f64,
) -> Result<(), GpuError> {
    const LENS: [usize; 3] = [40, 200, 9];
    const CUT: usize = 130;
    let heads = heads_of(shape, window);
    let (cores, (num_q, num_kv, width)) = (TensorCores::Best, shape);
    let name = format!(
        "attention, one document alone, {dtype}, heads {num_q}/{num_kv}×{width}, window {window:?}, dropout {rate}"
    );
    harness.case(name, 0.0, |case| {
        let [q_cols, _, v_cols] = columns(&heads);
        let (row, out_row, tokens) = (v_cols.end, q_cols.len(), LENS.iter().sum::<usize>());
        let (fused, dout) = (case.normal_values(tokens * row), case.normal_values(tokens * out_row));
        let samples = case.indices(LENS.len(), 1 << 20);
        let whole =
            Pack { heads, lens: &LENS, fused: &fused, dout: &dout, pad: 8, rate, samples: &samples, cores };
        let packed = whole.run(case, dtype);
        let part = |len: usize| {
            let of = |x: &[f32], row: usize| x[LENS[0] * row..][..len * row].to_vec();
            let (fused, dout) = (of(&fused, row), of(&dout, out_row));
            let pack = Pack { lens: &[len], fused: &fused, dout: &dout, samples: &samples[1..2], ..whole };
            pack.run(case, dtype)
        };
        let rows = |x: &[f64], row: usize, len: usize| x[LENS[0] * row..][..len * row].to_vec();
        let (alone, cut) = (part(LENS[1]), part(CUT));
        case.compare("out", width, alone.out, || rows(&packed.out, out_row, LENS[1]));
        case.compare("lse", num_q, alone.lse, || rows(&packed.lse, num_q, LENS[1]));
        case.compare("dq, dk, dv", width, alone.dqkv, || rows(&packed.dqkv, row, LENS[1]));
        case.compare("out of a prefix", width, cut.out, || rows(&packed.out, out_row, CUT));
        let [dq, ..] = split(&heads, &cut.dqkv);
        case.compare("dq of a prefix", width, dq, || split(&heads, &rows(&packed.dqkv, row, CUT))[0].clone());
    })
}

/// Decodes documents: first many tokens at once, then a few, then one by one. The outputs are those of forward. The last
/// two documents are the same up to token `SHARED`: the second one starts there, with the first one's whole pages and a
/// copy of the page where they part.
fn decode(
    harness: &Harness,
    dtype: DType,
    shape: Shape,
    window: Option<usize>,
    page_tokens: usize,
) -> Result<(), GpuError> {
    const LENS: [usize; 5] = [1, 9, 75, 150, 150];
    const SHARED: usize = 130;
    /// The length of documents after each round, unless they are shorter. The last token is decoded alone.
    const ROUNDS: [usize; 6] = [60, 61, 130, 148, 149, 150];
    let heads = heads_of(shape, window);
    let bounds = bounds_of(LENS);
    // Each row is a page table; entries after the last token are not read.
    let (pages, whole) = (16, SHARED / page_tokens);
    let mut tables = [[9, 99, 99, 99], [4, 99, 99, 99], [14, 2, 99, 99], [0, 15, 7, 99], [11, 6, 1, 99u32]];
    let copy = (tables[3][whole], tables[4][whole]);
    tables[4] = std::array::from_fn(|i| tables[if i < whole { 3 } else { 4 }][i]);
    let name = format!(
        "attention decode over a KV cache, {dtype}, heads {}/{}×{}, window {window:?}, pages of {page_tokens} tokens",
        heads.num_q, heads.num_kv, heads.width
    );
    harness.case(name, tolerance(dtype), |case| {
        let [q_cols, k_cols, v_cols] = columns(&heads);
        let (tokens, cols) = (LENS.iter().sum::<usize>(), v_cols.end);
        let mut storage = case.values(case.normals(tokens * cols, dtype));
        let share = |rows: &mut [f64], cols: usize| {
            let [from, to] = [3, 4].map(|doc| bounds[doc] as usize * cols);
            rows.copy_within(from..from + SHARED * cols, to);
        };
        share(&mut storage, cols);
        let elems = match case.queue {
            Queue::Cpu(_) => attention::kv_page_elems(heads.num_kv, heads.width, page_tokens),
            Queue::Cuda(_) => attention::cuda_kv_page_elems(heads.num_kv, heads.width, page_tokens, dtype),
        };
        let cache = KvCache { view: case.output(pages * elems, DType::F32), pages, page_tokens };
        let scratch = case.output(scratch_elems(case, &heads, &LENS), DType::F32);
        let mut all = vec![f64::NAN; tokens * q_cols.len()];
        let mut before = 0;
        for round in ROUNDS {
            let mut new = LENS.map(|len| before.min(len)..round.min(len));
            if round <= SHARED {
                new[4] = 0..0;
            }
            if before == SHARED {
                attention::copy_pages(case.queue, cache, &[copy]);
            }
            let rows = || {
                new.iter().zip(&bounds).flat_map(|(new, start)| new.clone().map(|i| (i, *start as usize + i)))
            };
            let fused: Vec<f32> =
                rows().flat_map(|(_, row)| &storage[row * cols..][..cols]).map(|x| *x as f32).collect();
            let positions: Vec<u32> = rows().map(|(i, _)| i as u32).collect();
            let qkv = case.padded(&fused, cols, 8, dtype);
            let out = case.padded_output(positions.len(), q_cols.len(), 8, dtype);
            let call = DecodeArgs {
                heads,
                out: out.mat,
                q: qkv.mat.columns(q_cols.start, q_cols.len()),
                k: qkv.mat.columns(k_cols.start, k_cols.len()),
                v: qkv.mat.columns(v_cols.start, v_cols.len()),
                cu_seqlens: case.input_u32(&bounds_of(new.clone().map(|new| new.len()))),
                positions: case.input_u32(&positions),
                page_tables: case.input_u32(tables.as_flattened()),
                cache,
                scratch,
            };
            attention::decode(case.queue, call);
            let values = case.padded_values(&out);
            for (values, (_, row)) in values.chunks_exact(q_cols.len()).zip(rows()) {
                all[row * q_cols.len()..][..q_cols.len()].copy_from_slice(values);
            }
            before = round;
        }
        // The rows that the documents share were computed once.
        share(&mut all, q_cols.len());
        let [q, k, v] = split(&heads, &storage);
        case.compare("out", heads.width, all, || reference::forward(heads, &bounds, &q, &k, &v).0);
    })
}
