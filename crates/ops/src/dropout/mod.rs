//! Dropout: an element is set to zero with probability p, otherwise divided by 1 − p.
//!
//! Whether an element is kept is a pure function of the seed, the step, the document's sample, the layer, the site, the
//! head, and the element's position and column in the document. So it depends neither on the packing of documents nor
//! on ranks or threads, and backward and recompute regenerate the same mask without storing it.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_device::{Queue, View};

use crate::Mat;

/// Where in a block dropout is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// The probabilities of attention: rows are queries, columns are keys.
    Probabilities,
    /// The output of attention, before it is added to the residual stream.
    AttentionOut,
    /// The output of the feed-forward layer, before it is added to the residual stream.
    MlpOut,
    /// The input of the adapter of one of a block's projections.
    Adapter(u8),
}

impl Site {
    /// Masks of the model itself come first, then, from [`Site::FIRST_ADAPTER`] on, those of adapters.
    const PER_LAYER: u32 = 3;
    const FIRST_ADAPTER: u32 = 1 << 20;
    const ADAPTERS_PER_LAYER: u32 = 16;
}

/// The masks of one site of one layer in one step, for every document of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'m> {
    /// At least 0 and below 1.
    pub rate: f64,
    pub seed: u64,
    pub step: u32,
    pub layer: u32,
    pub site: Site,
    /// The sample that each document is: \[documents\] in u32.
    pub samples: View<'m>,
}

impl Mask<'_> {
    pub(crate) fn of_doc(&self, doc: usize) -> DocMask {
        // SAFETY: samples are only read.
        let sample = unsafe { self.samples.as_slice::<u32>() }[doc];
        DocMask::new(self, sample)
    }

    /// An element is dropped if its random word is below this.
    pub(crate) fn threshold(&self) -> u32 {
        (self.rate * 4_294_967_296.0) as u32
    }

    /// The factor of elements that are kept.
    pub(crate) fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.rate)) as f32
    }

    /// The index of this mask's seed among those of a sample in a step: `mask_index` in the kernels.
    pub(crate) fn index(&self) -> u32 {
        let of_model = |place: u32| self.layer * Site::PER_LAYER + place;
        match self.site {
            Site::Probabilities => of_model(0),
            Site::AttentionOut => of_model(1),
            Site::MlpOut => of_model(2),
            Site::Adapter(place) => {
                Site::FIRST_ADAPTER + self.layer * Site::ADAPTERS_PER_LAYER + u32::from(place)
            }
        }
    }
}

/// The mask of one document.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DocMask {
    seed: u64,
    /// An element is dropped if its random word is below this.
    threshold: u32,
    scale: f32,
}

/// Elements that one block of the generator decides.
const PER_BLOCK: usize = 4;

impl DocMask {
    fn new(mask: &Mask, sample: u32) -> DocMask {
        let stream = RngStream::new(mask.seed, Purpose::Dropout, mask.step, sample);
        let [low, high, ..] = stream.block(mask.index());
        DocMask {
            seed: u64::from(high) << 32 | u64::from(low),
            threshold: mask.threshold(),
            scale: mask.scale(),
        }
    }

    /// Writes the factors of the elements from column `first` on, which must be a multiple of four.
    #[inline(always)]
    pub(crate) fn fill(&self, head: u32, position: usize, first: usize, out: &mut [f32]) {
        debug_assert!(first.is_multiple_of(PER_BLOCK));
        let stream = RngStream::new(self.seed, Purpose::Dropout, position as u32, head);
        for (block, out) in out.chunks_mut(PER_BLOCK).enumerate() {
            let words = stream.block((first / PER_BLOCK + block) as u32);
            for (out, word) in out.iter_mut().zip(words) {
                *out = if word < self.threshold { 0.0 } else { self.scale };
            }
        }
    }
}

/// y\[T, D\] = residual + mask · y, in place; without a mask, residual + y.
pub fn forward(queue: &Queue, y: Mat, residual: Mat, cu_seqlens: View, mask: Option<&Mask>) {
    check(&y, &residual, &cu_seqlens, mask);
    y.view.assert_disjoint(&residual.view);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, residual, cu_seqlens, mask),
        Queue::Cuda(cuda) => cuda::drop(cuda, y, y, Some(residual), cu_seqlens, mask),
    }
}

/// dx\[T, D\] = mask · dy; without a mask, dy.
pub fn backward(queue: &Queue, dx: Mat, dy: Mat, cu_seqlens: View, mask: Option<&Mask>) {
    check(&dx, &dy, &cu_seqlens, mask);
    dx.view.assert_disjoint(&dy.view);
    match queue {
        Queue::Cpu(cpu) => cpu::backward(cpu, dx, dy, cu_seqlens, mask),
        Queue::Cuda(cuda) => cuda::drop(cuda, dx, dy, None, cu_seqlens, mask),
    }
}

/// y\[T, D\] += mask · x; without a mask, y + x.
pub fn add(queue: &Queue, y: Mat, x: Mat, cu_seqlens: View, mask: Option<&Mask>) {
    check(&y, &x, &cu_seqlens, mask);
    y.view.assert_disjoint(&x.view);
    match queue {
        Queue::Cpu(cpu) => cpu::add(cpu, y, x, cu_seqlens, mask),
        Queue::Cuda(cuda) => cuda::drop(cuda, y, x, Some(y), cu_seqlens, mask),
    }
}

fn check(y: &Mat, x: &Mat, cu_seqlens: &View, mask: Option<&Mask>) {
    assert_eq!((y.rows, y.cols), (x.rows, x.cols), "shapes of a dropout must match");
    assert_eq!(y.view.dtype(), x.view.dtype(), "storage types must match");
    assert_eq!(cu_seqlens.dtype(), DType::U32, "cu_seqlens must be u32");
    assert!(cu_seqlens.len() > 1 || y.rows == 0, "cu_seqlens must not be empty");
    y.view.assert_disjoint(cu_seqlens);
    if let Some(mask) = mask {
        assert!((0.0..1.0).contains(&mask.rate), "dropout at rate {}", mask.rate);
        assert_eq!(mask.samples.len() + 1, cu_seqlens.len(), "one sample per document");
        assert_eq!(mask.samples.dtype(), DType::U32, "samples must be u32");
        y.view.assert_disjoint(&mask.samples);
    }
}
