use proptest::prelude::*;

use super::*;
use crate::dropout::{self, Site};
use crate::errors::Errors;
use crate::testing::{
    Operands, PaddedMat, SameBits, TestArena, assert_near, assert_within, bits, dot, dtype,
    finite_differences, queue, queues, tolerance, values,
};

fn heads(max_kv: usize, max_group: usize) -> impl Strategy<Value = (usize, usize)> {
    (1..=max_kv, 1..=max_group).prop_map(|(num_kv, group)| (num_kv * group, num_kv))
}

fn width() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1usize..=40, 1 => Just(48usize), 1 => Just(64), 1 => Just(80), 1 => Just(128)]
}

/// A document's length: short, empty, or at an edge of the query or key blocks.
fn length() -> impl Strategy<Value = usize> {
    let edges = prop::sample::select(vec![1usize, 47, 48, 49, 63, 64, 65, 95, 97, 128, 130]);
    prop_oneof![3 => 0usize..20, 2 => edges]
}

/// The sizes and values of one pack of documents.
#[derive(Clone, Debug)]
struct Pack {
    heads: Heads,
    dtype: DType,
    lens: Vec<usize>,
    /// The dropout rate, and the sample that each document is.
    rate: f64,
    samples: Vec<u32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

/// Everything attention writes, by rows.
#[derive(Clone, Debug, PartialEq)]
struct Results {
    out: Vec<u32>,
    lse: Vec<u32>,
    dq: Vec<u32>,
    dk: Vec<u32>,
    dv: Vec<u32>,
}

impl Pack {
    fn new(arena: &TestArena, heads: Heads, dtype: DType, lens: &[usize]) -> Pack {
        let tokens: usize = lens.iter().sum();
        let normals = |num_heads: usize| arena.normal_values(tokens * num_heads * heads.width);
        let (q, k, v, dout) =
            (normals(heads.num_q), normals(heads.num_kv), normals(heads.num_kv), normals(heads.num_q));
        let samples = arena.indices(lens.len(), 1 << 20);
        Pack { heads, dtype, lens: lens.to_vec(), rate: 0.0, samples, q, k, v, dout }
    }

    fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    fn bounds(&self) -> Vec<u32> {
        let ends = self.lens.iter().scan(0, |end, len| {
            *end += *len as u32;
            Some(*end)
        });
        [0].into_iter().chain(ends).collect()
    }

    /// The first token of document `doc`.
    fn start(&self, doc: usize) -> usize {
        self.lens[..doc].iter().sum()
    }

    /// The first `len` tokens of document `doc`, as a pack of their own.
    fn prefix(&self, doc: usize, len: usize) -> Pack {
        let first = self.start(doc);
        let rows = |x: &[f32], num_heads: usize| {
            let row = num_heads * self.heads.width;
            x[first * row..(first + len) * row].to_vec()
        };
        let Heads { num_q, num_kv, .. } = self.heads;
        Pack {
            lens: vec![len],
            samples: vec![self.samples[doc]],
            q: rows(&self.q, num_q),
            k: rows(&self.k, num_kv),
            v: rows(&self.v, num_kv),
            dout: rows(&self.dout, num_q),
            ..self.clone()
        }
    }

    /// This pack followed by another.
    fn then(mut self, other: Pack) -> Pack {
        self.lens.extend(other.lens);
        self.samples.extend(other.samples);
        self.q.extend(other.q);
        self.k.extend(other.k);
        self.v.extend(other.v);
        self.dout.extend(other.dout);
        self
    }

    fn dropped(self, rate: f64) -> Pack {
        Pack { rate, ..self }
    }

    fn mask<'b>(&self, arena: &'b TestArena) -> Mask<'b> {
        let samples = arena.input_u32(&self.samples);
        Mask { rate: self.rate, seed: 11, step: 5, layer: 2, site: Site::Probabilities, samples }
    }

    fn run(&self, arena: &TestArena, queue: &Queue) -> Results {
        let placed = PackOperands::new(arena, self, 0);
        placed.run(arena, queue, self)
    }
}

/// A pack in memory. q, k and v are columns of one matrix, and so are their gradients, with `pad` columns of padding
/// around the rows.
struct PackOperands<'b> {
    qkv: PaddedMat<'b>,
    dqkv: PaddedMat<'b>,
    out: PaddedMat<'b>,
    dout: PaddedMat<'b>,
    lse: View<'b>,
}

impl<'b> PackOperands<'b> {
    fn new(arena: &'b TestArena, pack: &Pack, pad: usize) -> PackOperands<'b> {
        let Heads { num_q, num_kv, width, .. } = pack.heads;
        let (tokens, q_cols, kv_cols) = (pack.tokens(), num_q * width, num_kv * width);
        let mut fused = Vec::new();
        for t in 0..tokens {
            fused.extend_from_slice(&pack.q[t * q_cols..][..q_cols]);
            fused.extend_from_slice(&pack.k[t * kv_cols..][..kv_cols]);
            fused.extend_from_slice(&pack.v[t * kv_cols..][..kv_cols]);
        }
        PackOperands {
            qkv: arena.padded(&fused, q_cols + 2 * kv_cols, pad, pack.dtype),
            dqkv: arena.padded_output(tokens, q_cols + 2 * kv_cols, pad, pack.dtype),
            out: arena.padded_output(tokens, q_cols, pad, pack.dtype),
            dout: arena.padded(&pack.dout, q_cols, pad, pack.dtype),
            lse: arena.output(tokens * num_q, DType::F32),
        }
    }

    fn run(&self, arena: &TestArena, queue: &Queue, pack: &Pack) -> Results {
        let Heads { num_q, num_kv, width, .. } = pack.heads;
        let (q_cols, kv_cols) = (num_q * width, num_kv * width);
        let longest = pack.lens.iter().copied().max().unwrap_or(0);
        let bytes = scratch_bytes(queue.num_threads(), longest, width);
        let part = |of: &PaddedMat<'b>, i: usize| match i {
            0 => of.mat.columns(0, q_cols),
            _ => of.mat.columns(q_cols + (i - 1) * kv_cols, kv_cols),
        };
        let call = ForwardArgs {
            heads: pack.heads,
            out: self.out.mat,
            lse: self.lse,
            q: part(&self.qkv, 0),
            k: part(&self.qkv, 1),
            v: part(&self.qkv, 2),
            cu_seqlens: arena.input_u32(&pack.bounds()),
            dropout: (pack.rate > 0.0).then(|| pack.mask(arena)),
            scratch: arena.output(bytes.0 as usize / 4, DType::F32),
        };
        forward(queue, call);
        let [dq, dk, dv] = [0, 1, 2].map(|i| part(&self.dqkv, i));
        backward(queue, BackwardArgs { dq, dk, dv, dout: self.dout.mat, forward: call });
        let [dq, dk, dv] = self.split(pack, &self.dqkv.bits());
        Results { out: self.out.bits(), lse: bits(self.lse), dq, dk, dv }
    }

    /// The three parts of a fused matrix, each contiguous.
    fn split<T: Copy>(&self, pack: &Pack, fused: &[T]) -> [Vec<T>; 3] {
        let (q_cols, kv_cols) = (pack.heads.num_q * pack.heads.width, pack.heads.num_kv * pack.heads.width);
        [(0, q_cols), (q_cols, kv_cols), (q_cols + kv_cols, kv_cols)].map(|(first, cols)| {
            let rows = fused.chunks_exact(q_cols + 2 * kv_cols);
            rows.flat_map(|row| &row[first..first + cols]).copied().collect()
        })
    }
}

impl Results {
    /// The rows of document `doc`.
    fn of_doc(&self, pack: &Pack, doc: usize) -> Results {
        let (first, len) = (pack.start(doc), pack.lens[doc]);
        let rows = |x: &[u32], row: usize| x[first * row..(first + len) * row].to_vec();
        let Heads { num_q, num_kv, width, .. } = pack.heads;
        Results {
            out: rows(&self.out, num_q * width),
            lse: rows(&self.lse, num_q),
            dq: rows(&self.dq, num_q * width),
            dk: rows(&self.dk, num_kv * width),
            dv: rows(&self.dv, num_kv * width),
        }
    }

    fn all(self) -> Vec<Vec<u32>> {
        vec![self.out, self.lse, self.dq, self.dk, self.dv]
    }
}

/// Heads with a scale relative to the usual one.
fn scaled(num_q: usize, num_kv: usize, width: usize, sharpness: f32) -> Heads {
    Heads { num_q, num_kv, width, scale: sharpness / (width as f32).sqrt(), window: None }
}

/// From scores that hardly differ to scores where one key dominates.
fn sharpness() -> impl Strategy<Value = f32> {
    prop_oneof![Just(1e-3f32), Just(0.1), Just(1.0), Just(4.0), Just(30.0)]
}

/// A score of magnitude s has an error of about s roundings of f32, and its exponential has that relative error.
fn sharp_tolerance(dtype: DType, sharpness: f32) -> f64 {
    tolerance(dtype).max(f64::from(sharpness) * 4e-7)
}

fn rate() -> impl Strategy<Value = f64> {
    prop_oneof![2 => Just(0.0), 1 => Just(0.1), 1 => Just(0.6)]
}

/// No window, a short one, or one at an edge of the blocks.
fn window() -> impl Strategy<Value = Option<usize>> {
    let edges = prop::sample::select(vec![1usize, 2, 16, 47, 63, 64, 65, 66, 100, 128, 500]);
    prop_oneof![2 => Just(None), 3 => edges.prop_map(Some)]
}

/// Compares every queue with the reference, and all queues with each other bit for bit.
fn check_against_reference(arena: &TestArena, pack: &Pack, pad: usize, tolerance: f64) {
    let mut same = SameBits::new();
    for queue in queues() {
        let placed = PackOperands::new(arena, pack, pad);
        let results = placed.run(arena, &queue, pack);
        let [q, k, v] = placed.split(pack, &placed.qkv.values());
        let [dq, dk, dv] = placed.split(pack, &placed.dqkv.values());
        let (bounds, dout) = (pack.bounds(), placed.dout.values());
        let mask = pack.mask(arena);
        let factor = |doc: usize, head: usize, i: usize, j: usize| {
            dropout::reference::factor(&mask, pack.samples[doc], head as u32, i, j)
        };
        let (out, lse) = reference::forward_dropped(pack.heads, &bounds, &q, &k, &v, &factor);
        let want = reference::backward_dropped(pack.heads, &bounds, [&q, &k, &v], &dout, &factor);
        // dq and dk are sums of differences with rounded results of forward; for a first token, of equal numbers. So
        // their errors are measured against the norm of random rows, scaled like scores and outputs. For a document of
        // two tokens a single rounding is the whole error, so allow for an unlucky one.
        let (size, width) = ((q.len() as f64).sqrt(), pack.heads.width);
        // With sharp scores, the differences are between dot products over the width of a head.
        let (scale, sharp) =
            (f64::from(pack.heads.scale), f64::from(pack.heads.scale) * (width as f64).sqrt());
        let slope = 2.0 * size * scale.max(1.0).max(sharp / 4.0) / (1.0 - pack.rate);
        // Values of opposite signs cancel; measure a row against a tenth of their norm.
        let tenth = 0.1 * (width as f64).sqrt();
        assert_within(&Errors::of_rows(&placed.out.values(), &out, width, 0.0, |_| tenth), tolerance);
        assert_near(&values(placed.lse), &lse, lse.len(), (lse.len() as f64).sqrt(), 3e-6);
        let of_row = slope / (q.len().max(1) as f64 / width as f64).sqrt();
        assert_within(&Errors::of_rows(&dq, &want.dq, width, slope, |_| of_row), tolerance);
        assert_within(&Errors::of_rows(&dk, &want.dk, width, slope, |_| of_row), tolerance);
        assert_near(&dv, &want.dv, width, size, tolerance);
        same.check(&queue, results.all());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn forward_and_backward_match_the_reference(
        (num_q, num_kv) in heads(2, 3), width in width(), lens in prop::collection::vec(length(), 1..4),
        sharpness in sharpness(), window in window(), rate in rate(),
        pad in 0usize..3, dtype in dtype(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let heads = Heads { window, ..scaled(num_q, num_kv, width, sharpness) };
        let pack = Pack::new(&arena, heads, dtype, &lens).dropped(rate);
        check_against_reference(&arena, &pack, pad, sharp_tolerance(dtype, sharpness));
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        (num_q, num_kv) in heads(2, 2), width in 1usize..5, lens in prop::collection::vec(1usize..6, 1..3),
        window in prop_oneof![Just(None), (1usize..5).prop_map(Some)], rate in rate(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let heads = Heads { window, ..scaled(num_q, num_kv, width, 1.0) };
        let pack = Pack::new(&arena, heads, DType::F32, &lens).dropped(rate);
        let placed = PackOperands::new(&arena, &pack, 0);
        placed.run(&arena, &Queue::cpu(1), &pack);
        let [q, k, v] = placed.split(&pack, &placed.qkv.values());
        let (bounds, r) = (pack.bounds(), placed.dout.values());
        let mask = pack.mask(&arena);
        let factor = |doc: usize, head: usize, i: usize, j: usize| {
            dropout::reference::factor(&mask, pack.samples[doc], head as u32, i, j)
        };
        let loss = |q: &[f64], k: &[f64], v: &[f64]| {
            dot(&r, &reference::forward_dropped(heads, &bounds, q, k, v, &factor).0)
        };
        let slopes = [
            finite_differences(&q, |q| loss(q, &k, &v)),
            finite_differences(&k, |k| loss(&q, k, &v)),
            finite_differences(&v, |v| loss(&q, &k, v)),
        ];
        for (got, slope) in placed.split(&pack, &placed.dqkv.values()).iter().zip(&slopes) {
            assert_near(got, slope, width, (q.len() as f64).sqrt(), tolerance(DType::F32));
        }
    }

    /// Row contract: a document alone has the same bits as in any pack, at any position, on any queue. So changing one
    /// document does not affect the others.
    #[test]
    fn a_document_does_not_depend_on_its_pack(
        (num_q, num_kv) in heads(2, 2), width in width(), len in length(),
        before in prop::collection::vec(length(), 0..3), after in prop::collection::vec(length(), 0..3),
        window in window(), rate in rate(), dtype in dtype(), picks in prop::array::uniform3(0usize..9),
        seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let heads = Heads { window, ..scaled(num_q, num_kv, width, 1.0) };
        let new = |lens: &[usize]| Pack::new(&arena, heads, dtype, lens).dropped(rate);
        let (doc, head, tail) = (new(&[len]), new(&before), new(&after));
        let alone = doc.run(&arena, &queue(picks[0]));
        let pack = head.clone().then(doc.clone()).then(tail);
        let packed = pack.run(&arena, &queue(picks[1]));
        prop_assert!(packed.of_doc(&pack, before.len()) == alone, "a document depends on its pack");

        let changed = head.then(doc).then(new(&after));
        let second = changed.run(&arena, &queue(picks[2]));
        for i in 0..=before.len() {
            prop_assert!(second.of_doc(&changed, i) == packed.of_doc(&pack, i), "document {} depends on a later one", i);
        }
    }

    /// Row contract along a document: if it is cut after a token, its rows have the same bits as in the whole. dk and
    /// dv are excluded, because they sum over later tokens.
    #[test]
    fn a_row_does_not_depend_on_later_tokens(
        (num_q, num_kv) in heads(2, 2), width in width(), len in 1usize..140, cut in 0usize..140,
        window in window(), rate in rate(), dtype in dtype(), picks in (0usize..9, 0usize..9),
        seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let heads = Heads { window, ..scaled(num_q, num_kv, width, 2.0) };
        let pack = Pack::new(&arena, heads, dtype, &[len]).dropped(rate);
        let prefix = pack.prefix(0, cut % len + 1);
        let whole = pack.run(&arena, &queue(picks.0));
        let part = prefix.run(&arena, &queue(picks.1));
        prop_assert_eq!(&part.out[..], &whole.out[..part.out.len()]);
        prop_assert_eq!(&part.lse[..], &whole.lse[..part.lse.len()]);
        prop_assert_eq!(&part.dq[..], &whole.dq[..part.dq.len()]);
    }
}

/// All block edges at once, with heads that fill panels exactly, exceed them or stay below.
#[test]
fn documents_at_the_edges_of_blocks() {
    for (num_q, num_kv, width, dtype) in
        [(3, 1, 1, DType::F32), (2, 2, 33, DType::BF16), (4, 2, 48, DType::F32), (2, 1, 128, DType::F16)]
    {
        let arena = TestArena::new(width as u64);
        let lens = [1, 47, 48, 0, 49, 63, 64, 65, 130];
        let pack = Pack::new(&arena, scaled(num_q, num_kv, width, 1.0), dtype, &lens);
        check_against_reference(&arena, &pack, 1, tolerance(dtype));
    }
}

/// A window larger than every document changes no bit; a window of one key returns its value.
#[test]
fn windows_of_all_keys_and_of_one() {
    let arena = TestArena::new(3);
    let pack = Pack::new(&arena, scaled(2, 2, 8, 1.0), DType::F32, &[65, 130, 3]);
    let with = |window| Pack { heads: Heads { window, ..pack.heads }, ..pack.clone() };
    let queue = Queue::cpu(2);
    assert_eq!(with(Some(130)).run(&arena, &queue), pack.run(&arena, &queue));
    let alone = with(Some(1)).run(&arena, &queue);
    let near = |got: u32, want: f32| (f32::from_bits(got) - want).abs() <= 1e-6 * want.abs();
    assert!(alone.out.iter().zip(&pack.v).all(|(got, want)| near(*got, *want)));
}

/// A key affects only the rows whose window contains it, however large it is.
#[test]
fn keys_before_the_window_are_hidden() {
    let arena = TestArena::new(4);
    let heads = Heads { window: Some(40), ..scaled(1, 1, 4, 1.0) };
    let mut pack = Pack::new(&arena, heads, DType::F32, &[200]);
    let before = pack.run(&arena, &Queue::cpu(1));
    pack.k[..4].fill(1e30);
    pack.v[..4].fill(1e30);
    let after = pack.run(&arena, &Queue::cpu(1));
    assert!(after.out[..40 * 4] != before.out[..40 * 4]);
    assert_eq!(after.out[40 * 4..], before.out[40 * 4..]);
    assert_eq!(after.dq[40 * 4..], before.dq[40 * 4..]);
    assert_eq!(after.dv[79 * 4..], before.dv[79 * 4..]);
}

/// Scores that rise by hundreds from block to block: the running maximum must rescale the sums. They reach 1000, where
/// the saved log-sum-exp has a resolution of 6e-5, and backward may be off by that much.
#[test]
fn rising_and_falling_scores_stay_finite() {
    let arena = TestArena::new(1);
    for slope in [5.0f32, -5.0] {
        let heads = Heads { num_q: 1, num_kv: 1, width: 1, scale: 1.0, window: None };
        let mut pack = Pack::new(&arena, heads, DType::F32, &[200]);
        pack.q.fill(1.0);
        pack.k = (0..200).map(|i| i as f32 * slope).collect();
        check_against_reference(&arena, &pack, 0, 6e-5);
    }
}

#[test]
fn zero_documents_are_a_no_op() {
    let arena = TestArena::new(1);
    let heads = scaled(2, 1, 4, 1.0);
    for queue in queues() {
        for lens in [&[][..], &[0], &[0, 0]] {
            let pack = Pack::new(&arena, heads, DType::F32, lens);
            assert_eq!(pack.run(&arena, &queue).all().concat(), []);
        }
    }
}
