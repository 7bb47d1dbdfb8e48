//! Units and their segments: the tensors of a unit, and their offsets in its flat buffer.

use std::fmt;

use lockstep_core::padded_elems;

use crate::{Biases, Head, Lora, ModelShape, WeightFormat, target_matches};

/// Which unit of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnitKind {
    Embed,
    Block(u32),
    /// A language-model head.
    Head,
    /// A scalar head, of a reward or value model.
    ScoreHead,
}

impl fmt::Display for UnitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnitKind::Embed => f.pad("embed"),
            UnitKind::Block(i) => f.pad(&format!("block {i}")),
            UnitKind::Head => f.pad("head"),
            UnitKind::ScoreHead => f.pad("score head"),
        }
    }
}

/// A weight, by its role in the unit's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Param {
    Embedding,
    InputNorm,
    Q,
    K,
    V,
    QNorm,
    KNorm,
    O,
    PostNorm,
    Gate,
    Up,
    Down,
    /// The bias of a projection.
    BiasOf(Projection),
    FinalNorm,
    LmHead,
    /// The scalar head's weight.
    Score,
    /// Several weights with the same input as a single matrix. Not tensors themselves: their [`Param::parts`] are.
    Qkv,
    GateUp,
    /// The matrices of a projection's adapter: \[r, in\] and \[out, r\].
    LoraA(Projection),
    LoraB(Projection),
    /// The A matrices of several adapters with the same input as a single matrix.
    LoraAQkv,
    LoraAGateUp,
}

impl Param {
    /// The tensors of a joined weight; any other weight has one part, itself.
    pub fn parts(&self) -> &[Param] {
        match self {
            Param::Qkv => &[Param::Q, Param::K, Param::V],
            Param::GateUp => &[Param::Gate, Param::Up],
            Param::LoraAQkv => {
                &[Param::LoraA(Projection::Q), Param::LoraA(Projection::K), Param::LoraA(Projection::V)]
            }
            Param::LoraAGateUp => &[Param::LoraA(Projection::Gate), Param::LoraA(Projection::Up)],
            single => std::slice::from_ref(single),
        }
    }
}

/// The projections of a block, each of which may have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Projection {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl Projection {
    pub const ALL: [Projection; 7] = [
        Projection::Q,
        Projection::K,
        Projection::V,
        Projection::O,
        Projection::Gate,
        Projection::Up,
        Projection::Down,
    ];

    /// The full name of its module.
    pub fn module(self, layer: usize) -> String {
        let parent = match self {
            Projection::Q | Projection::K | Projection::V | Projection::O => "self_attn",
            Projection::Gate | Projection::Up | Projection::Down => "mlp",
        };
        format!("model.layers.{layer}.{parent}.{}", self.weight().1)
    }

    /// Its weight, and the name of its module.
    pub(crate) const fn weight(self) -> (Param, &'static str) {
        match self {
            Projection::Q => (Param::Q, "q_proj"),
            Projection::K => (Param::K, "k_proj"),
            Projection::V => (Param::V, "v_proj"),
            Projection::O => (Param::O, "o_proj"),
            Projection::Gate => (Param::Gate, "gate_proj"),
            Projection::Up => (Param::Up, "up_proj"),
            Projection::Down => (Param::Down, "down_proj"),
        }
    }

    pub(crate) fn has_bias(self, biases: Biases) -> bool {
        match self {
            Projection::Q | Projection::K | Projection::V => biases.qkv,
            Projection::O => biases.out,
            Projection::Gate | Projection::Up | Projection::Down => biases.mlp,
        }
    }
}

/// Which tensors of a model are frozen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Freeze {
    #[default]
    Nothing,
    /// A model that is never trained: a reference, a reward model.
    All,
    /// Tensors that one of the patterns matches. See [`pattern_matches`].
    Matching(Vec<String>),
}

impl Freeze {
    pub fn freezes(&self, tensor: &str) -> bool {
        match self {
            Freeze::Nothing => false,
            Freeze::All => true,
            Freeze::Matching(patterns) => patterns.iter().any(|pattern| pattern_matches(pattern, tensor)),
        }
    }
}

/// Whether a pattern matches a tensor: its full name, or the name of a module that contains it (`model.layers.0` matches
/// all of block 0). `*` matches any text, including dots.
pub fn pattern_matches(pattern: &str, tensor: &str) -> bool {
    fn glob(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty() || text[0] == b'.',
            Some((b'*', rest)) => (0..=text.len()).any(|skipped| glob(rest, &text[skipped..])),
            Some((byte, rest)) => text.first() == Some(byte) && glob(rest, &text[1..]),
        }
    }
    glob(pattern.as_bytes(), tensor.as_bytes())
}

/// How a weight is initialised if it is not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightInit {
    /// Normal with the model's standard deviation.
    Normal,
    One,
    Zero,
    /// Uniform between ±1/√in, as PEFT initialises the A matrix of an adapter.
    KaimingUniform,
}

/// One tensor in a unit's flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub param: Param,
    /// The name in a Hugging Face checkpoint.
    pub name: String,
    pub shape: Vec<usize>,
    /// The offset in the unit's flat buffer, in elements; a multiple of 256.
    pub start: usize,
    /// The offset in the unit's gradients and optimizer states, which hold trained elements only; `None`: frozen.
    pub trained_start: Option<usize>,
    /// Whether it has weight decay.
    pub decay: bool,
    /// Whether it is stored in 4 bits ([`WeightFormat::Nf4`]).
    pub quantised: bool,
    pub init: WeightInit,
}

impl Segment {
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_trained(&self) -> bool {
        self.trained_start.is_some()
    }

    /// Whether it belongs to an adapter, so that the model's own folder does not have it.
    pub fn is_adapter(&self) -> bool {
        matches!(self.param, Param::LoraA(_) | Param::LoraB(_))
    }
}

/// The elements of a weight in its unit, as a matrix: one segment, or the segments of a joined weight. A vector has one
/// column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightExtent {
    pub start: usize,
    pub rows: usize,
    pub cols: usize,
    /// The offset of its gradient, if all of it is trained.
    pub trained_start: Option<usize>,
}

impl WeightExtent {
    pub const fn elems(&self) -> usize {
        self.rows * self.cols
    }

    fn of(segment: &Segment) -> WeightExtent {
        let Segment { start, trained_start, .. } = *segment;
        WeightExtent {
            start,
            rows: segment.shape[0],
            cols: segment.shape[1..].iter().product(),
            trained_start,
        }
    }
}

/// Adjacent tensors that are all trained or all frozen, and have the same weight decay setting and the same format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamGroup {
    /// Elements `[start, end)` of the unit: whole tensors with their padding.
    pub start: usize,
    pub end: usize,
    /// The offset among the unit's trained elements; `None`: frozen.
    pub trained_start: Option<usize>,
    pub decay: bool,
    pub quantised: bool,
}

impl ParamGroup {
    /// Whether the group after it continues it.
    fn joins(&self, next: &ParamGroup) -> bool {
        let kind = |group: &ParamGroup| (group.trained_start.is_some(), group.decay, group.quantised);
        kind(self) == kind(next)
    }
}

/// Adjacent parameter groups that are all trained or all frozen, and have one format. Ranks shard it as one range, like
/// FSDP's flat parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatParam {
    pub start: usize,
    pub end: usize,
    pub trained_start: Option<usize>,
    pub quantised: bool,
}

impl FlatParam {
    pub const fn elems(&self) -> usize {
        self.end - self.start
    }
}

/// A unit: its tensors, their parameter groups, and its size with padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitShape {
    pub kind: UnitKind,
    pub segments: Vec<Segment>,
    pub groups: Vec<ParamGroup>,
    pub elems: usize,
    /// The number of trained elements. Only they have gradients and optimizer states.
    pub trained_elems: usize,
}

impl UnitShape {
    pub fn find(&self, param: Param) -> Option<&Segment> {
        self.segments.iter().find(|s| s.param == param)
    }

    /// The elements of a weight. A joined weight has an extent only if its tensors are adjacent without padding.
    pub fn extent(&self, param: Param) -> Option<WeightExtent> {
        let mut parts = param.parts().iter().map(|part| self.find(*part).map(WeightExtent::of));
        let mut all = parts.next()??;
        for part in parts {
            let part = part?;
            if part.start != all.start + all.elems() || part.cols != all.cols {
                return None;
            }
            all.trained_start = all.trained_start.filter(|_| part.trained_start.is_some());
            all.rows += part.rows;
        }
        Some(all)
    }

    pub fn is_trained(&self, param: Param) -> bool {
        self.find(param).is_some_and(Segment::is_trained)
    }

    /// Whether some of its tensors are stored in 4 bits. They are dequantised before the unit is used.
    pub fn has_quantised(&self) -> bool {
        self.groups.iter().any(|group| group.quantised)
    }

    /// The ranges that ranks shard. Adjacent groups that are all trained or all frozen are merged, so that small tensors
    /// are not sharded one by one; tensors in 4 bits are kept apart from others.
    pub fn flat_params(&self) -> Vec<FlatParam> {
        let mut flat: Vec<FlatParam> = Vec::new();
        for group in &self.groups {
            match flat.last_mut() {
                Some(last)
                    if (last.trained_start.is_some(), last.quantised)
                        == (group.trained_start.is_some(), group.quantised) =>
                {
                    last.end = group.end
                }
                _ => flat.push(FlatParam {
                    start: group.start,
                    end: group.end,
                    trained_start: group.trained_start,
                    quantised: group.quantised,
                }),
            }
        }
        flat
    }

    /// The number of parameters, without padding.
    pub fn params(&self) -> u64 {
        self.segments.iter().map(|s| s.elems() as u64).sum()
    }

    /// The number of trained parameters, without padding.
    pub fn trained_params(&self) -> u64 {
        self.segments.iter().filter(|s| s.is_trained()).map(|s| s.elems() as u64).sum()
    }

    fn lay_out(kind: UnitKind, mut segments: Vec<Segment>) -> UnitShape {
        // A stable sort: tensors with weight decay first, otherwise in the family's order; adapters last, so that what is
        // frozen stays one flat parameter. Freezing a tensor does not move any, so joined weights stay adjacent.
        segments.sort_by_key(|s| (s.is_adapter(), !s.decay));
        let mut groups: Vec<ParamGroup> = Vec::new();
        let (mut at, mut trained) = (0, 0);
        for segment in &mut segments {
            let padded = padded_elems(segment.elems());
            let (start, end) = (at, at + padded);
            segment.start = start;
            segment.trained_start = segment.trained_start.map(|_| trained);
            let group = ParamGroup {
                start,
                end,
                trained_start: segment.trained_start,
                decay: segment.decay,
                quantised: segment.quantised,
            };
            match groups.last_mut() {
                Some(last) if last.joins(&group) => last.end = end,
                _ => groups.push(group),
            }
            at = end;
            trained += if segment.is_trained() { padded } else { 0 };
        }
        UnitShape { kind, segments, groups, elems: at, trained_elems: trained }
    }
}

/// The units of a model.
pub fn units(shape: &ModelShape, freeze: &Freeze, decay_norms: bool) -> Vec<UnitShape> {
    let builder =
        UnitBuilder { freeze, decay_norms, lora: shape.lora.as_ref(), format: shape.frozen_projections };
    let mut all = vec![builder.embed(shape)];
    all.extend((0..shape.layers).map(|layer| builder.block(shape, layer)));
    all.push(builder.head(shape));
    all
}

struct UnitBuilder<'a> {
    freeze: &'a Freeze,
    decay_norms: bool,
    lora: Option<&'a Lora>,
    /// The format of frozen projections.
    format: WeightFormat,
}

impl UnitBuilder<'_> {
    fn segment(&self, param: Param, name: String, shape: &[usize]) -> Segment {
        let is_norm = shape.len() == 1;
        let trains = self.trains(&name);
        let is_projection = Projection::ALL.iter().any(|of| of.weight().0 == param);
        Segment {
            param,
            shape: shape.to_vec(),
            start: 0,
            // The offset is assigned by `lay_out`.
            trained_start: trains.then_some(0),
            name,
            decay: !is_norm || self.decay_norms,
            quantised: self.format == WeightFormat::Nf4 && is_projection && !trains,
            init: if is_norm { WeightInit::One } else { WeightInit::Normal },
        }
    }

    /// A model with adapters trains them, and the modules that are saved with them.
    fn trains(&self, tensor: &str) -> bool {
        let module = tensor.trim_end_matches(".weight").trim_end_matches(".bias");
        let is_open = |lora: &Lora| {
            is_adapter_name(tensor) || lora.modules_to_save.iter().any(|saved| target_matches(saved, module))
        };
        self.lora.is_none_or(is_open) && !self.freeze.freezes(tensor)
    }

    /// The adapters of a block: all A matrices, then all B matrices, so that adjacent ones can be joined.
    fn add_adapters(&self, layer: usize, segments: &mut Vec<Segment>) {
        let Some(lora) = self.lora else { return };
        let targets = lora.targets.get(layer).map_or(&[][..], |targets| &targets[..]);
        let (mut all_a, mut all_b) = (Vec::new(), Vec::new());
        for of in targets {
            let weight = weight_of(segments, *of);
            let (rows, cols, stem) = (weight.shape[0], weight.shape[1], stem(weight));
            let a = self.segment(Param::LoraA(*of), format!("{stem}{LORA_A}"), &[lora.rank, cols]);
            let b = self.segment(Param::LoraB(*of), format!("{stem}{LORA_B}"), &[rows, lora.rank]);
            all_a.push(Segment { init: WeightInit::KaimingUniform, ..a });
            all_b.push(Segment { init: WeightInit::Zero, ..b });
        }
        segments.extend(all_a.into_iter().chain(all_b));
    }

    fn embed(&self, m: &ModelShape) -> UnitShape {
        let table = self.segment(Param::Embedding, "model.embed_tokens.weight".into(), &[m.vocab, m.dim]);
        UnitShape::lay_out(UnitKind::Embed, vec![table])
    }

    fn block(&self, m: &ModelShape, layer: usize) -> UnitShape {
        let (d, q, kv, f) = (m.dim, m.q_width(), m.kv_width(), m.ffn);
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let mut segments = vec![
            self.segment(Param::InputNorm, name("input_layernorm"), &[d]),
            self.segment(Param::Q, name("self_attn.q_proj"), &[q, d]),
            self.segment(Param::K, name("self_attn.k_proj"), &[kv, d]),
            self.segment(Param::V, name("self_attn.v_proj"), &[kv, d]),
            self.segment(Param::O, name("self_attn.o_proj"), &[d, q]),
            self.segment(Param::PostNorm, name("post_attention_layernorm"), &[d]),
            self.segment(Param::Gate, name("mlp.gate_proj"), &[f, d]),
            self.segment(Param::Up, name("mlp.up_proj"), &[f, d]),
            self.segment(Param::Down, name("mlp.down_proj"), &[d, f]),
        ];
        if m.architecture.qk_norm() {
            segments.push(self.segment(Param::QNorm, name("self_attn.q_norm"), &[m.head_dim]));
            segments.push(self.segment(Param::KNorm, name("self_attn.k_norm"), &[m.head_dim]));
        }
        self.add_biases(m.biases, &mut segments);
        self.add_adapters(layer, &mut segments);
        UnitShape::lay_out(UnitKind::Block(layer as u32), segments)
    }

    /// Biases are initialised to zero, and have weight decay if norms have it.
    fn add_biases(&self, biases: Biases, segments: &mut Vec<Segment>) {
        for of in Projection::ALL.into_iter().filter(|of| of.has_bias(biases)) {
            let weight = weight_of(segments, of);
            let (name, len) = (format!("{}.bias", stem(weight)), weight.shape[0]);
            let bias = self.segment(Param::BiasOf(of), name, &[len]);
            segments.push(Segment { init: WeightInit::Zero, ..bias });
        }
    }

    fn head(&self, m: &ModelShape) -> UnitShape {
        let mut segments = vec![self.segment(Param::FinalNorm, "model.norm.weight".into(), &[m.dim])];
        if m.head == Head::Score {
            segments.push(self.segment(Param::Score, "score.weight".into(), &[1, m.dim]));
            return UnitShape::lay_out(UnitKind::ScoreHead, segments);
        }
        if !m.tied {
            segments.push(self.segment(Param::LmHead, "lm_head.weight".into(), &[m.vocab, m.dim]));
        }
        UnitShape::lay_out(UnitKind::Head, segments)
    }
}

/// The ends of the names of an adapter's tensors, as in PEFT.
const LORA_A: &str = ".lora_A.weight";
const LORA_B: &str = ".lora_B.weight";

fn is_adapter_name(tensor: &str) -> bool {
    tensor.ends_with(LORA_A) || tensor.ends_with(LORA_B)
}

/// The segment of a projection's weight.
fn weight_of(segments: &[Segment], of: Projection) -> &Segment {
    segments.iter().find(|s| s.param == of.weight().0).expect("every block has its projections")
}

fn stem(weight: &Segment) -> &str {
    weight.name.trim_end_matches(".weight")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn freeze(patterns: &[&str]) -> Freeze {
        Freeze::Matching(patterns.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn patterns_match_tensors_modules_and_wildcards() {
        let name = "model.layers.10.self_attn.q_proj.weight";
        for pattern in
            [name, "model.layers.10", "*q_proj", "*.self_attn.*", "model.layers.1*", "*", "model*weight"]
        {
            assert!(pattern_matches(pattern, name), "{pattern}");
        }
        for pattern in ["model.layers.1", "q_proj", "*k_proj*", "", "model.layers.10.self", "*q_pro"] {
            assert!(!pattern_matches(pattern, name), "{pattern}");
        }
    }

    /// A joined weight covers exactly the elements of its tensors, or has no extent. Freezing and weight decay do not
    /// change that.
    #[test]
    fn joined_weights_cover_exactly_their_tensors() {
        let tiny = ModelShape::named("tiny", 300).unwrap();
        for (dim, head_dim, kv_heads, ffn) in
            [(64, 16, 2, 176), (60, 20, 1, 64), (64, 2, 2, 50), (48, 16, 1, 3)]
        {
            let shape = ModelShape { dim, head_dim, heads: 4, kv_heads, ffn, ..tiny.clone() };
            let (q, kv) = (shape.q_width(), shape.kv_width());
            let fits = |elems: usize| elems.is_multiple_of(256);
            let k_frozen = freeze(&["*k_proj", "*norm"]);
            for (freeze, decay_norms) in [
                (&Freeze::Nothing, false),
                (&Freeze::Nothing, true),
                (&Freeze::All, false),
                (&k_frozen, false),
                (&k_frozen, true),
            ] {
                for block in &units(&shape, freeze, decay_norms)[1..=shape.layers] {
                    let qkv = block.extent(Param::Qkv);
                    assert_eq!(qkv.is_some(), fits(q * dim) && fits(kv * dim), "{shape:?}");
                    let gate_up = block.extent(Param::GateUp);
                    assert_eq!(gate_up.is_some(), fits(ffn * dim), "{shape:?}");
                    for (joined, param, rows) in
                        [(qkv, Param::Qkv, q + 2 * kv), (gate_up, Param::GateUp, 2 * ffn)]
                    {
                        let Some(joined) = joined else { continue };
                        let trained = param.parts().iter().all(|part| block.is_trained(*part));
                        assert_eq!(
                            (joined.rows, joined.cols, joined.trained_start.is_some()),
                            (rows, dim, trained)
                        );
                        let mut at = joined.start;
                        for part in param.parts() {
                            let part = block.find(*part).unwrap();
                            assert_eq!(part.start, at);
                            at += part.elems();
                        }
                        assert_eq!(at, joined.start + joined.elems());
                    }
                }
            }
        }
    }

    /// Frozen projections are quantised; embeddings, norms, biases, heads and what is trained are not.
    #[test]
    fn frozen_projections_are_quantised() {
        let biases = Biases { qkv: true, out: true, mlp: true };
        let targets = Lora::targets_of(&["q_proj".into()], 4).unwrap();
        let modules_to_save = vec!["layers.1.mlp.down_proj".into()];
        let lora =
            Lora { rank: 4, alpha: 8.0, dropout: 0.0, rank_stabilized: false, targets, modules_to_save };
        let tiny = ModelShape { layers: 2, ..ModelShape::named("tiny", 300).unwrap() };
        let shape =
            ModelShape { biases, lora: Some(lora), frozen_projections: WeightFormat::Nf4, ..tiny.clone() };
        let all = units(&shape, &Freeze::Nothing, false);
        let quantised = all.iter().flat_map(|unit| &unit.segments).filter(|s| s.quantised);
        let names: Vec<&str> = quantised.map(|s| s.name.as_str()).collect();
        let is_projection = |name: &&str| name.ends_with("_proj.weight") && !name.contains("1.mlp.down");
        let wanted = all.iter().flat_map(|unit| &unit.segments).map(|s| s.name.as_str());
        assert_eq!(names, wanted.filter(is_projection).collect::<Vec<_>>());
        assert_eq!(names.len(), 13);
        let plain = units(&tiny, &Freeze::All, false);
        assert!(!plain.iter().any(UnitShape::has_quantised));
    }

    #[test]
    fn a_tensor_has_the_extent_of_its_segment() {
        let shape = ModelShape::named("tiny", 300).unwrap();
        for unit in units(&shape, &Freeze::Nothing, false) {
            for segment in &unit.segments {
                let extent = unit.extent(segment.param).unwrap();
                assert_eq!((extent.start, extent.elems()), (segment.start, segment.elems()));
                assert_eq!(extent.rows, segment.shape[0]);
            }
        }
    }

    /// Groups cover the unit, flat parameters cover the groups, and trained elements are contiguous.
    #[test]
    fn groups_and_flat_params_cover_a_unit() {
        let plain = ModelShape::named("tiny", 300).unwrap();
        let nf4 = ModelShape { frozen_projections: WeightFormat::Nf4, ..plain.clone() };
        for (patterns, shape, decay_norms) in [
            (&[][..], &plain, false),
            (&["*norm"], &plain, false),
            (&["*k_proj"], &nf4, false),
            (&["*"], &plain, false),
            (&["*"], &nf4, true),
            (&["*self_attn*", "model.layers.1"], &nf4, false),
            (&["*down_proj"], &plain, false),
        ] {
            for unit in units(shape, &freeze(patterns), decay_norms) {
                let ends = |at: usize, start: usize, end: usize| (start == at).then_some(end);
                let groups = unit.groups.iter().try_fold(0, |at, g| ends(at, g.start, g.end));
                let flat = unit.flat_params().iter().try_fold(0, |at, c| ends(at, c.start, c.end));
                assert_eq!((groups, flat), (Some(unit.elems), Some(unit.elems)));
                let kind = |flat: &FlatParam| (flat.trained_start.is_some(), flat.quantised);
                assert!(unit.flat_params().windows(2).all(|w| kind(&w[0]) != kind(&w[1])));
                for segment in &unit.segments {
                    let (start, end) = (segment.start, segment.start + segment.elems());
                    let flat = unit.flat_params().into_iter().find(|f| f.start <= start && end <= f.end);
                    assert_eq!(flat.map(|f| f.quantised), Some(segment.quantised), "{}", segment.name);
                }
                let mut at = 0;
                for segment in &unit.segments {
                    let frozen = freeze(patterns).freezes(&segment.name);
                    assert_eq!(segment.trained_start, (!frozen).then_some(at), "{}", segment.name);
                    at += if frozen { 0 } else { padded_elems(segment.elems()) };
                }
                assert_eq!(at, unit.trained_elems);
            }
        }
    }
}
