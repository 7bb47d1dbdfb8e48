//! A fused matmul equals its parts: a block gives the same results with one matmul for queries, keys and values, and
//! one for gate and up, as with separate matmuls.

use std::cell::Cell;

use lockstep_core::rng::{Purpose, RngStream};
use lockstep_core::{Bytes, DType};
use lockstep_device::{Memory, Pool, Queue, View};
use lockstep_model::{Inputs, KernelBackend, Unit, fill_rope_tables, run_program, workspace_bytes};
use lockstep_ops::rows::RowMap;
use lockstep_shape::{
    Architecture, Biases, Channel, Freeze, ModelShape, Program, ProgramStep, Programs, Recompute, Slot,
    SlotCols, UnitShape, block_programs, units,
};

const TOKENS: usize = 70;

/// The same steps with a matmul for each part of a fused weight.
fn split(program: &Program, block: &UnitShape) -> Program {
    let parts = |step: &ProgramStep| -> Vec<ProgramStep> {
        let (ProgramStep::Linear { w, .. }
        | ProgramStep::LinearBackInput { w, .. }
        | ProgramStep::LinearBackWeight { w, .. }) = step
        else {
            return vec![*step];
        };
        if w.parts().len() == 1 {
            return vec![*step];
        }
        let mut start = 0;
        let each = w.parts().iter().enumerate().map(|(i, part)| {
            let len = block.extent(*part).expect("a part is a tensor").rows;
            let columns = |of: SlotCols| SlotCols { slot: of.slot, start, len };
            let step = match *step {
                ProgramStep::Linear { x, y, residual, .. } => {
                    ProgramStep::Linear { x, w: *part, y: columns(y), residual }
                }
                ProgramStep::LinearBackInput { dy, dx, .. } => {
                    ProgramStep::LinearBackInput { dy: columns(dy), w: *part, dx, add: i > 0 }
                }
                ProgramStep::LinearBackWeight { dy, x, .. } => {
                    ProgramStep::LinearBackWeight { dy: columns(dy), x, w: *part }
                }
                other => other,
            };
            start += len;
            step
        });
        each.collect()
    };
    Program::new(program.steps.iter().flat_map(parts).collect())
}

/// The results of a block's forward and backward: its output and saved slots, then ∂x and all gradients.
struct Results {
    forward: Vec<Vec<f32>>,
    backward: Vec<Vec<f32>>,
}

fn run_block(shape: &ModelShape, programs: &Programs, block: &UnitShape, storage: DType) -> Results {
    let queue = Queue::cpu(2);
    let memory = Memory::allocate(Bytes(64 << 20), &Pool::new(1)).unwrap();
    let (used, draws) = (Cell::new(0), Cell::new(0));
    let take = |len: usize, dtype: DType| -> View<'_> {
        let at = used.get();
        used.set((at + len * dtype.size()).next_multiple_of(256));
        memory.view(at, len, dtype)
    };
    let normals = |len: usize, dtype: DType, size: f32| -> View<'_> {
        let stream = RngStream::new(7, Purpose::Init, draws.replace(draws.get() + 1), 0);
        let values = (0..len.div_ceil(2) as u32).flat_map(|i| stream.normal_pair(i)).take(len);
        let view = take(len, dtype);
        view.write_f32(&values.map(|value| size * value).collect::<Vec<f32>>()).unwrap();
        view
    };
    let indices = |values: Vec<u32>| -> View<'_> {
        let view = take(values.len(), DType::U32);
        view.write(&values).unwrap();
        view
    };
    let mut slots = [None; Slot::COUNT];
    for spec in &programs.specs {
        slots[spec.slot.index()] = Some(normals(TOKENS * spec.width, spec.dtype.unwrap_or(storage), 1.0));
    }
    let tables = take(2 * shape.max_positions * shape.head_dim / 2, DType::F32);
    fill_rope_tables(shape, tables).unwrap();
    let workspace = workspace_bytes(shape, TOKENS, TOKENS, KernelBackend::Cpu { num_threads: 2 });
    let grads = normals(block.trained_elems, DType::F32, 1.0);
    let none = View::empty().cast(DType::U32);
    let unit = Unit {
        queue: &queue,
        model: shape,
        shape: block,
        programs,
        params: normals(block.elems, storage, 0.2),
        grads: Some(grads),
        overwrite_grads: false,
        tied: None,
        slots,
        inputs: Inputs {
            tokens: indices(vec![0; TOKENS]),
            targets: indices(vec![0; TOKENS]),
            positions: indices((0..50).chain(0..20).collect()),
            cu_seqlens: indices(vec![0, 50, 70]),
            head_rows: RowMap { source: none, offsets: none, entries: none },
            shared_rows: None,
            outputs: [None; Channel::COUNT],
            coefficients: None,
            decode: None,
        },
        tables,
        workspace: take(workspace.0 as usize / 4, DType::F32),
        head_chunk: 256,
        inverse_temperature: 1.0,
        dropout: None,
    };
    let values = |view: View| {
        let mut values = vec![0f32; view.len()];
        view.read_f32(&mut values).unwrap();
        values
    };
    let read = |slot: Slot| values(slots[slot.index()].expect("a slot of the block"));
    run_program(&programs.forward, &unit);
    let forward = programs.saved.iter().chain(&[Slot::Y]).map(|slot| read(*slot)).collect();
    run_program(&programs.backward, &unit);
    Results { forward, backward: vec![read(Slot::DX), values(grads)] }
}

#[test]
fn a_fused_matmul_equals_its_parts() {
    let tiny = ModelShape::named("tiny", 300).unwrap();
    let biases = Biases { qkv: true, out: true, mlp: true };
    let shapes = [
        ModelShape { biases, ..tiny.clone() },
        ModelShape { architecture: Architecture::Qwen3, ..tiny.clone() },
        tiny,
    ];
    for (shape, storage) in shapes.iter().flat_map(|shape| [(shape, DType::F32), (shape, DType::BF16)]) {
        let block = &units(shape, &Freeze::Nothing, false)[1];
        let programs = block_programs(shape, block, Recompute::None, false);
        let [forward, backward] =
            [&programs.forward, &programs.backward].map(|program| split(program, block));
        assert_eq!(forward.steps.len(), programs.forward.steps.len() + 3);
        assert_eq!(backward.steps.len(), programs.backward.steps.len() + 6);
        let separate = Programs { forward, backward, ..programs.clone() };
        let (fused, separate) =
            (run_block(shape, &programs, block, storage), run_block(shape, &separate, block, storage));
        // In forward, rows and columns of a matmul are independent. In backward, a fused matmul sums over more terms,
        // and so rounds differently.
        assert!(fused.forward == separate.forward, "{storage}: bits of forward differ");
        let tolerance = if storage == DType::F32 { 1e-5 } else { 2e-2 };
        for (fused, separate) in fused.backward.iter().zip(&separate.backward) {
            let norm = |values: &mut dyn Iterator<Item = f32>| {
                values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
            };
            let difference = norm(&mut fused.iter().zip(separate).map(|(a, b)| a - b));
            let error = difference / norm(&mut separate.iter().copied());
            assert!(error < tolerance, "{storage}: {error:e}");
        }
    }
}
