//! Low-rank adapters (LoRA): a frozen weight W gets a trained update of low rank, y = W·x + scale · B·A·dropout(x).
//!
//! A is \[r, in\], B is \[out, r\] and starts at zero. This file says which projections have an adapter, and builds the
//! steps that adapters add to a block's programs. `family` puts them next to the projections.

use crate::{DropoutSite, Param, ProgramStep, Projection, Slot, SlotCols, SlotSpec, UnitShape};

/// The adapters of a model. Weights that are not in `modules_to_save` are frozen.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// r: the rank of the update.
    pub rank: usize,
    pub alpha: f64,
    /// The probability that dropout sets an element of an adapter's input to zero.
    pub dropout: f64,
    /// rsLoRA: scale by alpha / √r instead of alpha / r.
    pub rank_stabilized: bool,
    /// For each layer, the projections that have an adapter.
    pub targets: Vec<Vec<Projection>>,
    /// Patterns of modules that are trained as a whole, and saved with the adapters.
    pub modules_to_save: Vec<String>,
}

impl Lora {
    /// What the update is multiplied by.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }) as f32
    }

    pub fn has(&self, layer: usize, of: Projection) -> bool {
        self.targets.get(layer).is_some_and(|targets| targets.contains(&of))
    }

    /// The projections of a model of `layers` layers that these patterns target: the name of a module (`q_proj`,
    /// `self_attn.q_proj`, `model.layers.0.self_attn.q_proj`, with `*` for any text), or `all-linear` for all of them. An
    /// error is the first pattern that targets nothing.
    pub fn targets_of(patterns: &[String], layers: usize) -> Result<Vec<Vec<Projection>>, String> {
        let all = || (0..layers).flat_map(|layer| Projection::ALL.map(|of| (layer, of)));
        let matches = |pattern: &str, layer: usize, of: Projection| {
            pattern == ALL_LINEAR || target_matches(pattern, &of.module(layer))
        };
        let targets_nothing =
            |pattern: &&String| !all().any(|(layer, of)| matches(pattern.as_str(), layer, of));
        if let Some(pattern) = patterns.iter().find(targets_nothing) {
            return Err(pattern.clone());
        }
        let of_layer = |layer: usize| {
            let targeted = |of: &Projection| patterns.iter().any(|pattern| matches(pattern, layer, *of));
            Projection::ALL.into_iter().filter(targeted).collect()
        };
        Ok((0..layers).map(of_layer).collect())
    }

    /// The columns of a part of a hidden slot. Parts start on multiples of eight columns, so that kernels can use vectors.
    fn part_cols(&self) -> usize {
        self.rank.next_multiple_of(8)
    }

    /// The slots that adapters add to a block. `widest` is the widest input of a projection.
    pub(crate) fn slot_specs(&self, widest: usize) -> Vec<SlotSpec> {
        let part = self.part_cols();
        let hidden = AdapterSite::ALL.map(|site| (site.hidden(), site.projections().len() * part));
        let mut all: Vec<(Slot, usize)> = hidden.into_iter().chain([(Slot::DLora, 3 * part)]).collect();
        all.extend((self.dropout > 0.0).then_some((Slot::LoraX, widest)));
        all.into_iter().map(|(slot, width)| SlotSpec::activation(slot, width)).collect()
    }
}

/// The pattern that targets every projection of every block.
pub const ALL_LINEAR: &str = "all-linear";

/// Whether a pattern is a module's name or the end of it after a dot. `*` matches any text.
pub fn target_matches(pattern: &str, module: &str) -> bool {
    fn glob(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => (0..=text.len()).any(|skipped| glob(rest, &text[skipped..])),
            Some((byte, rest)) => text.first() == Some(byte) && glob(rest, &text[1..]),
        }
    }
    let starts = std::iter::once(0).chain(module.match_indices('.').map(|(dot, _)| dot + 1));
    starts.into_iter().any(|start| glob(pattern.as_bytes(), &module.as_bytes()[start..]))
}

/// The places in a block where projections with a common input have adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdapterSite {
    Qkv,
    O,
    GateUp,
    Down,
}

impl AdapterSite {
    const ALL: [AdapterSite; 4] = [AdapterSite::Qkv, AdapterSite::O, AdapterSite::GateUp, AdapterSite::Down];

    const fn projections(self) -> &'static [Projection] {
        match self {
            AdapterSite::Qkv => &[Projection::Q, Projection::K, Projection::V],
            AdapterSite::O => &[Projection::O],
            AdapterSite::GateUp => &[Projection::Gate, Projection::Up],
            AdapterSite::Down => &[Projection::Down],
        }
    }

    /// scale · A·x of each projection, in adjacent columns.
    pub(crate) const fn hidden(self) -> Slot {
        match self {
            AdapterSite::Qkv => Slot::LoraQkv,
            AdapterSite::O => Slot::LoraO,
            AdapterSite::GateUp => Slot::LoraGateUp,
            AdapterSite::Down => Slot::LoraDown,
        }
    }

    /// The A matrices of all projections as a single matrix.
    const fn joined(self) -> Param {
        match self {
            AdapterSite::Qkv => Param::LoraAQkv,
            AdapterSite::O => Param::LoraA(Projection::O),
            AdapterSite::GateUp => Param::LoraAGateUp,
            AdapterSite::Down => Param::LoraA(Projection::Down),
        }
    }
}

/// The steps of the adapters at one site of a block.
#[derive(Clone, Debug)]
pub(crate) struct AdapterSteps {
    site: AdapterSite,
    rank: usize,
    part_cols: usize,
    drops: bool,
    /// The width of the projections' input.
    width: usize,
    /// The A matrices of all projections are adjacent and have the same input.
    is_joined: bool,
    /// The projections with an adapter, and their place among those of the site.
    members: Vec<(usize, Projection)>,
}

impl AdapterSteps {
    /// `None` if no projection of the site has an adapter.
    pub(crate) fn of(lora: Option<&Lora>, block: &UnitShape, site: AdapterSite) -> Option<AdapterSteps> {
        let lora = lora?;
        let all = site.projections().iter().copied().enumerate();
        let members: Vec<(usize, Projection)> =
            all.filter(|(_, of)| block.find(Param::LoraA(*of)).is_some()).collect();
        let drops = lora.dropout > 0.0;
        let is_joined = !drops && lora.rank == lora.part_cols() && block.extent(site.joined()).is_some();
        let (_, first) = members.first()?;
        let width = block.find(Param::LoraA(*first))?.shape[1];
        let (rank, part_cols) = (lora.rank, lora.part_cols());
        Some(AdapterSteps { site, rank, part_cols, drops, width, is_joined, members })
    }

    /// The columns of a member in a slot of hidden numbers; of all members, if their A is one matrix.
    fn cols(&self, slot: Slot, place: usize) -> SlotCols {
        SlotCols { slot, start: place * self.part_cols, len: self.rank }
    }

    /// Whether the gradient of the input can start with the adapters'. Dropout adds to what is there.
    pub(crate) const fn can_start_dx(&self) -> bool {
        !self.drops
    }

    /// The matmuls with A: one for all members, or one for each.
    fn a_matmuls(&self, slot: Slot) -> Vec<(Param, SlotCols, DropoutSite)> {
        if self.is_joined {
            let len = self.members.len() * self.part_cols;
            let first = self.members[0].1;
            return vec![(self.site.joined(), SlotCols { slot, start: 0, len }, DropoutSite::Lora(first))];
        }
        let one = |(place, of): &(usize, Projection)| {
            (Param::LoraA(*of), self.cols(slot, *place), DropoutSite::Lora(*of))
        };
        self.members.iter().map(one).collect()
    }

    fn scale(&self, slot: Slot) -> impl Iterator<Item = ProgramStep> {
        self.a_matmuls(slot).into_iter().map(|(_, x, _)| ProgramStep::LoraScale { x })
    }

    /// hidden = scale · A·dropout(x)
    pub(crate) fn hidden(&self, x: SlotCols) -> Vec<ProgramStep> {
        let mut steps = Vec::new();
        for (w, y, site) in self.a_matmuls(self.site.hidden()) {
            let x = self.dropped(x, site, &mut steps);
            steps.push(ProgramStep::Linear { x, w, y, residual: None });
        }
        steps.extend(self.scale(self.site.hidden()));
        steps
    }

    /// The input of a member's A: x, or a copy with dropout.
    fn dropped(&self, x: SlotCols, site: DropoutSite, steps: &mut Vec<ProgramStep>) -> SlotCols {
        if !self.drops {
            return x;
        }
        steps.push(ProgramStep::DropoutCopy { x, y: Slot::LoraX, site });
        self.dropped_cols()
    }

    /// The columns of the slot for dropout that this site uses; the slot is as wide as the widest input.
    fn dropped_cols(&self) -> SlotCols {
        SlotCols { slot: Slot::LoraX, start: 0, len: self.width }
    }

    /// Whether every projection of the site has an adapter.
    pub(crate) fn is_complete(&self) -> bool {
        self.members.len() == self.site.projections().len()
    }

    /// y = start + B·hidden, for the columns of every projection of the site that has an adapter.
    pub(crate) fn outputs(
        &self,
        y: &[SlotCols],
        start: impl Fn(SlotCols) -> Option<SlotCols>,
    ) -> Vec<ProgramStep> {
        let one = |(place, of): &(usize, Projection)| ProgramStep::Linear {
            x: self.cols(self.site.hidden(), *place),
            w: Param::LoraB(*of),
            y: y[*place],
            residual: start(y[*place]),
        };
        self.members.iter().map(one).collect()
    }

    /// The gradient of hidden before scaling: scale · Bᵀ·dy.
    pub(crate) fn hidden_grads(&self, dy: &[SlotCols]) -> Vec<ProgramStep> {
        let one = |(place, of): &(usize, Projection)| ProgramStep::LinearBackInput {
            dy: dy[*place],
            w: Param::LoraB(*of),
            dx: self.cols(Slot::DLora, *place),
            add: false,
        };
        self.members.iter().map(one).chain(self.scale(Slot::DLora)).collect()
    }

    /// dB += dy·hiddenᵀ and dA += dhidden·xᵀ.
    pub(crate) fn weight_grads(&self, dy: &[SlotCols], x: SlotCols) -> Vec<ProgramStep> {
        let of_b = |(place, of): &(usize, Projection)| ProgramStep::LinearBackWeight {
            dy: dy[*place],
            x: self.cols(self.site.hidden(), *place),
            w: Param::LoraB(*of),
        };
        let mut steps: Vec<ProgramStep> = self.members.iter().map(of_b).collect();
        for (w, dy, site) in self.a_matmuls(Slot::DLora) {
            let x = self.dropped(x, site, &mut steps);
            steps.push(ProgramStep::LinearBackWeight { dy, x, w });
        }
        steps
    }

    /// dx = Aᵀ·dhidden, or dx += dropout(Aᵀ·dhidden). The first can come before what the weights add to dx: the matmul of
    /// the weights then accumulates, which saves a pass over dx.
    pub(crate) fn input_grads(&self, dx: SlotCols, starts_dx: bool) -> Vec<ProgramStep> {
        let mut steps = Vec::new();
        for (i, (w, dy, site)) in self.a_matmuls(Slot::DLora).into_iter().enumerate() {
            if self.drops {
                steps.push(ProgramStep::LinearBackInput { dy, w, dx: self.dropped_cols(), add: false });
                steps.push(ProgramStep::DropoutAdd { x: Slot::LoraX, y: dx, site });
            } else {
                steps.push(ProgramStep::LinearBackInput { dy, w, dx, add: i > 0 || !starts_dx });
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_by_name_suffix_and_wildcard() {
        let targets = |patterns: &[&str]| {
            let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
            Lora::targets_of(&patterns, 2)
        };
        use Projection::*;
        assert_eq!(targets(&["q_proj", "v_proj"]), Ok(vec![vec![Q, V]; 2]));
        assert_eq!(targets(&["mlp.down_proj"]), Ok(vec![vec![Down]; 2]));
        assert_eq!(targets(&["model.layers.1.*"]), Ok(vec![vec![], Projection::ALL.to_vec()]));
        assert_eq!(targets(&["layers.0.self_attn.o_proj", "*k_proj"]), Ok(vec![vec![K, O], vec![K]]));
        assert_eq!(targets(&[ALL_LINEAR]), Ok(vec![Projection::ALL.to_vec(); 2]));
        assert_eq!(targets(&["q_proj", "proj"]), Err("proj".into()));
        assert_eq!(targets(&["lm_head"]), Err("lm_head".into()));
    }

    #[test]
    fn the_scale_of_lora_and_rslora() {
        let lora = Lora {
            rank: 16,
            alpha: 32.0,
            dropout: 0.0,
            rank_stabilized: false,
            targets: vec![],
            modules_to_save: vec![],
        };
        assert_eq!(lora.scale(), 2.0);
        assert_eq!(Lora { rank_stabilized: true, ..lora }.scale(), 8.0);
    }
}
