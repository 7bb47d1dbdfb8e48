//! The attention steps. Where documents share rows, attention runs on copies of its operands at every position: rows
//! that several documents share are computed once everywhere else.

use lockstep_ops::attention::{self, BackwardArgs, DecodeArgs, ForwardArgs};
use lockstep_ops::dropout;
use lockstep_ops::rows::{self, RowMap};
use lockstep_shape::{ProgramStep, Slot, SlotCols};

use crate::unit::Unit;

/// The columns of queries, keys and values, and the slots of the output and the log-sum-exp.
#[derive(Clone, Copy)]
struct Operands {
    qkv: [SlotCols; 3],
    out: Slot,
    lse: Slot,
}

pub(crate) fn attention_step(step: &ProgramStep, unit: &Unit) {
    match *step {
        ProgramStep::Attention { q, k, v, out, lse, .. } => {
            let operands = Operands { qkv: [q, k, v], out, lse };
            match (&unit.inputs.decode, &unit.inputs.shared_rows) {
                (Some(_), _) => decode(unit, &operands),
                (None, Some(map)) => shared_forward(unit, &operands, map),
                (None, None) => attention::forward(unit.queue, forward_args(unit, &operands)),
            }
        }
        ProgramStep::AttentionBack { q, k, v, out, lse, dout, dqkv, .. } => {
            let operands = Operands { qkv: [q, k, v], out, lse };
            match &unit.inputs.shared_rows {
                Some(map) => shared_backward(unit, &operands, dout, dqkv, map),
                None => attention::backward(unit.queue, backward_args(unit, &operands, dout, dqkv)),
            }
        }
        _ => unreachable!("an attention step"),
    }
}

fn forward_args<'m>(unit: &Unit<'m>, operands: &Operands) -> ForwardArgs<'m> {
    let [q, k, v] = operands.qkv.map(|cols| unit.mat(cols));
    ForwardArgs {
        heads: unit.heads(),
        out: unit.mat(operands.out.into()),
        lse: unit.statistic(operands.lse),
        q,
        k,
        v,
        cu_seqlens: unit.inputs.cu_seqlens,
        dropout: unit.mask(dropout::Site::Probabilities),
        scratch: unit.workspace,
    }
}

fn backward_args<'m>(
    unit: &Unit<'m>,
    operands: &Operands,
    dout: Slot,
    dqkv: [SlotCols; 3],
) -> BackwardArgs<'m> {
    let [dq, dk, dv] = dqkv.map(|cols| unit.mat(cols));
    BackwardArgs { dq, dk, dv, dout: unit.mat(dout.into()), forward: forward_args(unit, operands) }
}

fn decode(unit: &Unit, operands: &Operands) {
    let [q, k, v] = operands.qkv.map(|cols| unit.mat(cols));
    let decode = unit.decode();
    let call = DecodeArgs {
        heads: unit.heads(),
        out: unit.mat(operands.out.into()),
        q,
        k,
        v,
        cu_seqlens: unit.inputs.cu_seqlens,
        positions: unit.inputs.positions,
        page_tables: decode.page_tables,
        cache: decode.cache.expect("a block has a KV cache"),
        scratch: unit.workspace,
    };
    attention::decode(unit.queue, call);
}

/// The operands at every position, and queries, keys and values copied there.
fn expand_qkv(unit: &Unit, operands: &Operands, map: &RowMap) -> Operands {
    let mut start = 0;
    let qkv = operands.qkv.map(|cols| {
        let len = unit.mat(cols).cols;
        start += len;
        SlotCols { slot: Slot::PosQkv, start: start - len, len }
    });
    let in_one_slot = operands.qkv.iter().all(|cols| cols.slot == Slot::Qkv);
    if in_one_slot {
        rows::expand(unit.queue, unit.mat(Slot::PosQkv.into()), unit.mat(Slot::Qkv.into()), map.source);
    } else {
        for (from, to) in operands.qkv.into_iter().zip(qkv) {
            rows::expand(unit.queue, unit.mat(to), unit.mat(from), map.source);
        }
    }
    Operands { qkv, out: Slot::PosO, lse: Slot::PosLse }
}

fn shared_forward(unit: &Unit, operands: &Operands, map: &RowMap) {
    let copies = expand_qkv(unit, operands, map);
    attention::forward(unit.queue, forward_args(unit, &copies));
    rows::first(unit.queue, unit.mat(operands.out.into()), unit.mat(copies.out.into()), map);
    rows::first(unit.queue, unit.mat(operands.lse.into()), unit.mat(copies.lse.into()), map);
}

/// A row's output is that of its first position, so its gradient counts there. Its queries, keys and values are used at
/// all of its positions, so their gradients are summed.
fn shared_backward(unit: &Unit, operands: &Operands, dout: Slot, dqkv: [SlotCols; 3], map: &RowMap) {
    let copies = expand_qkv(unit, operands, map);
    rows::expand(unit.queue, unit.mat(copies.out.into()), unit.mat(operands.out.into()), map.source);
    rows::expand(unit.queue, unit.mat(copies.lse.into()), unit.mat(operands.lse.into()), map.source);
    rows::expand_first(unit.queue, unit.mat(Slot::PosDO.into()), unit.mat(dout.into()), map);
    let copied = copies.qkv.map(|cols| SlotCols { slot: Slot::PosDQkv, ..cols });
    attention::backward(unit.queue, backward_args(unit, &copies, Slot::PosDO, copied));
    let [dqkv, _, _] = dqkv.map(|cols| unit.mat(SlotCols::from(cols.slot)));
    rows::sum(unit.queue, dqkv, unit.mat(Slot::PosDQkv.into()), map);
}
