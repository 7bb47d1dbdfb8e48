//! Which pages of the KV cache are in use.

/// The pages of a KV cache, with the number of users of each.
#[derive(Debug)]
pub(super) struct PagePool {
    free: Vec<u32>,
    num_users: Vec<u32>,
}

impl PagePool {
    pub(super) fn new(pages: usize) -> PagePool {
        PagePool { free: (0..pages as u32).rev().collect(), num_users: vec![0; pages] }
    }

    pub(super) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free page, with one user.
    pub(super) fn take(&mut self) -> u32 {
        let page = self.free.pop().expect("the caller has checked that a page is free");
        self.num_users[page as usize] = 1;
        page
    }

    /// Adds a user to a page that is in use.
    pub(super) fn share(&mut self, page: u32) {
        assert!(self.num_users[page as usize] > 0, "page {page} is free");
        self.num_users[page as usize] += 1;
    }

    pub(super) fn num_users(&self, page: u32) -> u32 {
        self.num_users[page as usize]
    }

    /// Removes a user of each page. A page without users is free.
    pub(super) fn release(&mut self, pages: &[u32]) {
        for page in pages {
            let num_users = &mut self.num_users[*page as usize];
            *num_users = num_users.checked_sub(1).expect("a page that is released has a user");
            if *num_users == 0 {
                self.free.push(*page);
            }
        }
    }
}
