//! Divides the cores of a node among its ranks.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores this process may run on, in ascending order. Empty if the system does not report them.
pub fn available() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// The share of `cores` for one of `local_world` ranks. Shares are contiguous and disjoint, and together cover all
/// cores. `None` if there are fewer cores than ranks.
pub fn share(cores: &[usize], local_rank: u32, local_world: u32) -> Option<&[usize]> {
    let (rank, ranks) = (local_rank as usize, local_world as usize);
    if ranks == 0 || rank >= ranks || cores.len() < ranks {
        return None;
    }
    Some(&cores[cores.len() * rank / ranks..cores.len() * (rank + 1) / ranks])
}

/// The number of threads for each of `local_world` ranks on `cores` cores: the same for every rank, and at least one.
pub fn threads(cores: usize, local_world: u32) -> usize {
    (cores / (local_world as usize).max(1)).max(1)
}

/// Pins this thread, and every thread it starts from now on, to `cores`.
pub fn pin(cores: &[usize]) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| set.set(core));
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_complete() {
        for cores in 0..40 {
            let all: Vec<usize> = (0..cores).map(|i| 2 * i + 3).collect();
            for ranks in 1..10 {
                let shares: Vec<_> = (0..ranks).map(|rank| share(&all, rank, ranks)).collect();
                if cores < ranks as usize {
                    assert!(shares.iter().all(Option::is_none));
                    continue;
                }
                let joined: Vec<usize> = shares.iter().flat_map(|s| s.unwrap().iter().copied()).collect();
                assert_eq!(joined, all);
                assert!(shares.iter().all(|s| s.unwrap().len() >= threads(cores, ranks)));
            }
        }
        assert_eq!(share(&[1, 2], 2, 2), None);
        assert_eq!(threads(1, 4), 1);
    }

    #[test]
    fn this_process_has_cores_and_can_be_pinned() {
        let cores = available();
        assert!(!cores.is_empty());
        std::thread::spawn(move || {
            pin(&cores[..1]).unwrap();
            assert_eq!(available(), &cores[..1]);
        })
        .join()
        .unwrap();
    }
}
