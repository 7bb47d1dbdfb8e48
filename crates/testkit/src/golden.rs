//! Files under `goldens/`, written by `goldens/make.py`.

use std::path::{Path, PathBuf};

use lockstep_ckpt::{ModelFolder, SafetensorsFile};
use lockstep_shape::ModelShape;

use crate::test_objective::TestBatch;

/// The repository's `goldens/` folder.
pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens")
}

/// One golden case: a model folder, and what PyTorch computes with it.
pub struct Golden {
    pub folder: ModelFolder,
    pub shape: ModelShape,
    file: SafetensorsFile,
}

impl Golden {
    pub fn open(case: &str) -> Golden {
        let dir = golden_dir().join(case);
        let folder = ModelFolder::open(&dir).expect("goldens are in the repository");
        let shape = ModelShape::from_hf_text(folder.config_json(), case).expect("a family we know");
        let file =
            SafetensorsFile::open(&dir.join("golden.safetensors")).expect("goldens are in the repository");
        Golden { folder, shape, file }
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn u32(&self, name: &str) -> Vec<u32> {
        let bytes = self.bytes(name);
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let info = self.file.tensor(name).unwrap_or_else(|| panic!("golden tensor {name}"));
        let mut bytes = vec![0; info.elems() * 4];
        self.file.read_into(name, 0..info.elems(), &mut bytes).expect("goldens are readable");
        bytes
    }

    /// The batch of the single forward and backward pass.
    pub fn batch(&self) -> TestBatch {
        TestBatch::new(self.u32("tokens"), self.u32("targets"), self.f32("weights"), self.u32("cu_seqlens"))
    }

    /// The batches of the ten optimizer steps: two micro-batches each.
    pub fn step_batches(&self) -> Vec<[TestBatch; 2]> {
        let (tokens, targets) = (self.u32("steps.tokens"), self.u32("steps.targets"));
        let (weights, bounds) = (self.f32("steps.weights"), self.u32("steps.micro_bounds"));
        let (cu, cu_bounds) = (self.u32("steps.cu_seqlens"), self.u32("steps.cu_bounds"));
        let micro_batch = |i: usize| {
            let at = bounds[i] as usize..bounds[i + 1] as usize;
            let docs = cu[cu_bounds[i] as usize..cu_bounds[i + 1] as usize].to_vec();
            TestBatch::new(
                tokens[at.clone()].to_vec(),
                targets[at.clone()].to_vec(),
                weights[at].to_vec(),
                docs,
            )
        };
        (0..10).map(|s| [micro_batch(2 * s), micro_batch(2 * s + 1)]).collect()
    }
}
