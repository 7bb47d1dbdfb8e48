//! All kernels of this crate, for those who compile them in advance: a test without a GPU, or a cache to fill.

use lockstep_core::DType;
use lockstep_device::cuda::{KernelSource, KernelVariant};

use crate::attention::Heads;
use crate::optimizer::{ParamFormat, StateFormat, UpdateFormat};
use crate::{
    adamw, bias, cross_entropy, dropout, embedding, lion, nf4, reduce, rmsnorm, rope, rows, scale,
    score_head, sgd, swiglu,
};

/// Every source in every variant that a run on such a GPU may use.
pub fn all_kernel_sources(sm: u32) -> Vec<(&'static KernelSource, KernelVariant)> {
    let by_type = [
        &bias::cuda::SOURCE,
        &cross_entropy::cuda::SOURCE,
        &dropout::cuda::SOURCE,
        &embedding::cuda::SOURCE,
        &nf4::cuda::SOURCE,
        &rmsnorm::cuda::SOURCE,
        &rope::cuda::SOURCE,
        &rows::cuda::SOURCE,
        &scale::cuda::SOURCE,
        &score_head::cuda::SOURCE,
        &swiglu::cuda::SOURCE,
    ];
    let types = [DType::F32, DType::BF16, DType::F16];
    let mut all = vec![(&reduce::cuda::SOURCE, KernelVariant::of(DType::F32))];
    all.extend(crate::attention::all_cuda_sources(sm));
    all.extend(by_type.into_iter().flat_map(|source| types.map(|real| (source, KernelVariant::of(real)))));
    for optimizer in ["adamw", "lion", "sgd"] {
        all.extend(update_formats().map(|format| optimizer_kernel_source(optimizer, format)));
    }
    all
}

/// All combinations of formats. Gradients are bf16 only where weights are.
fn update_formats() -> impl Iterator<Item = UpdateFormat> {
    let masters = [DType::F32, DType::BF16, DType::F16].map(|working| ParamFormat::Master { working });
    let params = masters.into_iter().chain([ParamFormat::Split, ParamFormat::Stochastic]);
    params.flat_map(|params| {
        let has_bf16 = !matches!(params, ParamFormat::Master { working: DType::F32 | DType::F16 });
        let grads = [Some(DType::F32), has_bf16.then_some(DType::BF16)].into_iter().flatten();
        grads.flat_map(move |grads| {
            let states = [StateFormat::F32, StateFormat::Bf16, StateFormat::Blockwise];
            states.map(|states| UpdateFormat { params, states, grads })
        })
    })
}

/// The source of an optimizer's update kernels, by the optimizer's name.
pub fn optimizer_kernel_source(
    optimizer: &str,
    format: UpdateFormat,
) -> (&'static KernelSource, KernelVariant) {
    let source = match optimizer {
        "adamw" => &adamw::cuda::SOURCE,
        "sgd" => &sgd::cuda::SOURCE,
        "lion" => &lion::cuda::SOURCE,
        other => panic!("unknown optimizer {other}"),
    };
    (source, crate::optimizer::cuda::variant(format))
}

/// The source of the score head's kernels.
pub fn score_head_kernel_source(storage: DType) -> (&'static KernelSource, KernelVariant) {
    (&score_head::cuda::SOURCE, KernelVariant::of(storage))
}

/// The source of the kernels of low-rank adapters.
pub fn adapter_kernel_source(storage: DType) -> (&'static KernelSource, KernelVariant) {
    (&scale::cuda::SOURCE, KernelVariant::of(storage))
}

/// The source of the kernels that dequantise 4-bit weights.
pub fn dequantise_kernel_source(storage: DType) -> (&'static KernelSource, KernelVariant) {
    (&nf4::cuda::SOURCE, KernelVariant::of(storage))
}

/// The sources that a model's steps use: weights and activations of one type, heads of one width.
pub fn model_kernel_sources(
    sm: u32,
    storage: DType,
    heads: &Heads,
    drops: bool,
) -> Vec<(&'static KernelSource, KernelVariant)> {
    let of = |source| (source, KernelVariant::of(storage));
    let mut all = vec![
        of(&bias::cuda::SOURCE),
        of(&cross_entropy::cuda::SOURCE),
        (&cross_entropy::cuda::SOURCE, KernelVariant::of(DType::F32)),
        of(&embedding::cuda::SOURCE),
        (&embedding::cuda::SOURCE, KernelVariant::of(DType::F32)),
        of(&rmsnorm::cuda::SOURCE),
        of(&rope::cuda::SOURCE),
        of(&rows::cuda::SOURCE),
        (&rows::cuda::SOURCE, KernelVariant::of(DType::F32)),
        of(&swiglu::cuda::SOURCE),
        (&reduce::cuda::SOURCE, KernelVariant::of(DType::F32)),
    ];
    all.extend(crate::attention::model_cuda_sources(sm, storage, heads, drops));
    all.extend(drops.then(|| of(&dropout::cuda::SOURCE)));
    all
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use lockstep_device::cuda::{LibrarySearch, Nvrtc, compile};

    use super::*;

    /// Constants are defined by the host: kernels use all of them and define none of them again.
    #[test]
    fn shared_constants_are_defined_once() {
        let mut count = 0;
        for (source, variant) in all_kernel_sources(90) {
            for (name, value) in
                source.defines.iter().chain(&variant.defines).filter(|(name, _)| !name.is_empty())
            {
                let uses =
                    source.text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| word == name);
                assert!(uses.count() > 0 && *value > 0, "{} does not use {name} = {value}", source.name);
                for kind in ["int", "u32"] {
                    let own = source.text.contains(&format!("{kind} {name} ="));
                    assert!(!own, "{} defines {name} itself", source.name);
                }
                count += 1;
            }
        }
        assert!(count > 100, "{count} constants");
    }

    /// Compiles for the oldest supported GPU and a newer one, with the compiler that the environment names.
    #[test]
    fn kernels_compile() {
        let folder = |name| std::env::var_os(name).map(PathBuf::from).into_iter().collect::<Vec<_>>();
        let mut search = LibrarySearch::around(&folder("CUDA_HOME"), &folder("VIRTUAL_ENV"));
        let named = folder("LOCKSTEP_NVRTC_DIR");
        search.folders.extend(named.clone());
        let nvrtc = match Nvrtc::open(&search) {
            Ok(nvrtc) => nvrtc,
            Err(cause) if named.is_empty() => return println!("skipped: {cause}"),
            Err(cause) => panic!("{named:?}: {cause}"),
        };
        let both = [80, 90]
            .map(|sm| all_kernel_sources(sm).into_iter().map(move |(source, variant)| (source, variant, sm)));
        let all: Vec<_> = both.into_iter().flatten().collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((source, variant, sm)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let code = compile(&nvrtc, source, variant, *sm).unwrap_or_else(|cause| panic!("{cause}"));
                assert!(!code.is_empty(), "{} for sm_{sm}", source.name);
            }
        };
        let num_threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        std::thread::scope(|scope| (0..num_threads).for_each(|_| drop(scope.spawn(work))));
    }
}
