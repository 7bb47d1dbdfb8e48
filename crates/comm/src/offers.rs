//! The views that a rank offers to a peer in one call.

use lockstep_device::View;

use crate::carrier::MAX_OFFERS;

/// A list of up to [`MAX_OFFERS`] views, stored inline so that a call does not allocate.
pub(crate) struct Offers<'m> {
    views: [View<'m>; MAX_OFFERS],
    len: usize,
}

impl<'m> Offers<'m> {
    pub(crate) fn from_views(views: impl Iterator<Item = View<'m>>) -> Offers<'m> {
        let mut offers = Offers::none();
        for view in views {
            offers.views[offers.len] = view;
            offers.len += 1;
        }
        offers
    }

    pub(crate) fn none() -> Offers<'m> {
        Offers { views: [View::empty(); MAX_OFFERS], len: 0 }
    }

    pub(crate) fn views(&self) -> &[View<'m>] {
        &self.views[..self.len]
    }
}
