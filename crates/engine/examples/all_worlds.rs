//! Runs every case of the matrix (mesh, accumulation, storage, strategy, offload, recomputation, prefetch,
//! carrier) and compares each with plain ddp on its mesh, bit for bit. Prints the table for the docs.
//!
//!     cargo run --release -p lockstep-engine --example all_worlds [-- EVERY [SKIP]]
//!
//! EVERY runs only each EVERY-th case, after the first SKIP; 7, 11 or 13 meet all values of everything. The whole matrix
//! in parts: EVERY 7 with SKIP from 0 to 6.

#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use lockstep_testkit::{Case, all_cases, run_case};

fn main() {
    let argument = |n, or| std::env::args().nth(n).map_or(or, |n| n.parse().expect("a number of cases"));
    let (every, skip): (usize, usize) = (argument(1, 1), argument(2, 0));
    let start = Instant::now();
    // Cases that share a plain one follow each other, so that each is run once.
    let mut groups: Vec<(Case, Vec<Case>)> = Vec::new();
    for case in all_cases().into_iter().skip(skip).step_by(every) {
        match groups.iter_mut().find(|(plain, _)| *plain == case.baseline()) {
            Some((_, cases)) => cases.push(case),
            None => groups.push((case.baseline(), vec![case])),
        }
    }
    let queue = Mutex::new(groups.into_iter());
    // Strategy, optimizer tier, parameter tier: cases, and those that differ.
    let rows: Mutex<BTreeMap<String, (usize, Vec<String>)>> = Mutex::new(BTreeMap::new());
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((plain, cases)) = { queue.lock().expect("no panic").next() } {
                    let want = run_case(&plain);
                    for case in cases {
                        let same = run_case(&case) == want;
                        let name = format!("{:?} | {} | {}", case.strategy, case.optimizer, case.params)
                            .to_lowercase();
                        let mut rows = rows.lock().expect("no panic");
                        let row = rows.entry(name).or_default();
                        row.0 += 1;
                        row.1.extend((!same).then(|| case.to_string()));
                    }
                }
            });
        }
    });
    let rows = rows.into_inner().expect("no panic");
    println!("| strategy | optimizer | parameters | runs | bit-equal to ddp |\n|---|---|---|---|---|");
    for (name, (runs, differ)) in &rows {
        println!("| {name} | {runs} | {} |", runs - differ.len());
    }
    let (runs, differ) = rows.values().fold((0, 0), |sum, (n, d)| (sum.0 + n, sum.1 + d.len()));
    println!("\n{runs} runs, {differ} differ, {:.0} s", start.elapsed().as_secs_f64());
    rows.values().flat_map(|(_, differ)| differ).for_each(|case| println!("differs: {case}"));
    assert_eq!(differ, 0, "strategies must not change a bit");
}
