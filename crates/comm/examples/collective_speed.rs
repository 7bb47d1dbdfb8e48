//! Measures collectives between processes on this machine.
//!
//!     cargo run --release -p lockstep-comm --example collective_speed -- --ranks 2 --by shm tcp
//!
//! Starts itself once for every rank. Prints one line of JSON for every carrier, operation and size: the time of one
//! call, as the median and minimum over several batches of calls. Sizes are bytes over all ranks together.

#![allow(clippy::print_stdout)]

use std::io::{BufRead, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstep_comm::{Abort, Call, CarrierChoice, Comm, CommError, ConnectSpec, GatherPart, Group, connect};
use lockstep_core::fold::fold_scratch_elems;
use lockstep_core::proof::Secret;
use lockstep_core::{Axis, Bytes, DType, Mesh, Rank};
use lockstep_device::{Memory, Pool, View};

const OPERATIONS: [&str; 5] = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast"];
const SIZES: [usize; 9] = [4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
const BATCHES: usize = 7;

#[derive(Clone, Debug)]
struct Options {
    ranks: u32,
    carriers: Vec<String>,
    operations: Vec<String>,
    sizes: Vec<usize>,
    /// Target duration of one batch of calls.
    seconds: f64,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let options = match parse(&words) {
        Ok(options) => options,
        Err(why) => {
            println!("{why}");
            return ExitCode::from(64);
        }
    };
    if let Ok(child) = std::env::var("COLLECTIVE_SPEED_CHILD") {
        let (carrier, rank) = child.split_once(' ').expect("a carrier and a rank");
        run_rank(carrier, rank.parse().expect("a rank"), &options).expect("collectives succeed");
        return ExitCode::SUCCESS;
    }
    for carrier in &options.carriers {
        run_world(carrier, &options, &words);
    }
    ExitCode::SUCCESS
}

fn parse(words: &[String]) -> Result<Options, String> {
    let mut options = Options {
        ranks: 2,
        carriers: vec!["shm".into(), "tcp".into()],
        operations: OPERATIONS.map(String::from).to_vec(),
        sizes: SIZES.to_vec(),
        seconds: 0.1,
    };
    for group in words.chunk_by(|_, next| !next.starts_with("--")) {
        let values = &group[1..];
        let number = |text: &String| text.parse::<usize>().map_err(|e| format!("{text}: {e}"));
        let first = values.first().ok_or_else(|| format!("{} needs a value", group[0]));
        match group[0].as_str() {
            "--ranks" => options.ranks = number(first?)? as u32,
            "--by" => options.carriers = values.to_vec(),
            "--operations" => options.operations = values.to_vec(),
            "--sizes" => options.sizes = values.iter().map(number).collect::<Result<_, _>>()?,
            "--seconds" => options.seconds = first?.parse().map_err(|e| format!("--seconds: {e}"))?,
            other => return Err(format!("unknown option {other}")),
        }
    }
    Ok(options)
}

// ---- the parent: starts the ranks, exchanges their addresses, prints what rank 0 measured --------------------

fn run_world(carrier: &str, options: &Options, words: &[String]) {
    let mut ranks: Vec<Child> = (0..options.ranks)
        .map(|rank| {
            Command::new(std::env::current_exe().expect("this program's path"))
                .args(words)
                .env("COLLECTIVE_SPEED_CHILD", format!("{carrier} {rank}"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a rank starts")
        })
        .collect();
    let mut inputs: Vec<_> = ranks.iter_mut().map(|rank| rank.stdin.take().expect("a pipe")).collect();
    let mut outputs: Vec<_> = ranks
        .iter_mut()
        .map(|rank| std::io::BufReader::new(rank.stdout.take().expect("a pipe")).lines())
        .collect();
    // Ranks print lines in lockstep. A line that is not JSON is an exchange: all ranks wait for everyone's line.
    loop {
        let lines: Vec<Option<String>> =
            outputs.iter_mut().map(|out| out.next().and_then(Result::ok)).collect();
        match &lines[0] {
            Some(line) if line.starts_with('{') => println!("{line}"),
            Some(_) => {
                let all = lines.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(" ");
                inputs
                    .iter_mut()
                    .for_each(|input| writeln!(input, "{all}").expect("the rank reads its input"));
            }
            None => break,
        }
    }
    ranks.iter_mut().for_each(|rank| assert!(rank.wait().expect("a rank ends").success(), "a rank failed"));
}

// ---- a rank ---------------------------------------------------------------------------------------------------

fn run_rank(carrier: &str, rank: u32, options: &Options) -> Result<(), CommError> {
    let largest = options.sizes.iter().copied().max().unwrap_or(4).next_multiple_of(4096);
    let scratch_bytes = fold_scratch_elems(options.ranks) * 4;
    let memory = Memory::allocate_shared(Bytes((largest + scratch_bytes) as u64), &Pool::new(1));
    let memory = Arc::new(memory.expect("memory for the largest size"));
    let spec = ConnectSpec {
        rank: Rank(rank),
        world: options.ranks,
        host: None,
        regions: vec![memory.clone()],
        bind: "127.0.0.1:0".parse().expect("an address"),
        advertise: None,
        session: &Secret::from_text("collective_speed"),
        run_id: "collective_speed",
        deadline: Duration::from_secs(60),
        abort: Abort::default(),
        carrier: if carrier == "shm" { CarrierChoice::Shm } else { CarrierChoice::Tcp },
        spin: None,
    };
    let comm = connect(&spec, &mut |mine| {
        println!("{}", mine.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).expect("the parent answers");
        Ok(line.split_whitespace().map(unhex).collect())
    })?;
    let mesh = Mesh::on_one_node(1, options.ranks);
    let group = Group::along(&mesh, Axis::World, Rank(rank));
    let scratch = memory.view(largest, scratch_bytes / 4, DType::F32);
    let mut bench = Bench { comm, group, scratch };
    for operation in &options.operations {
        for size in &options.sizes {
            if operation == "barrier" && *size != options.sizes[0] {
                continue;
            }
            let view = memory.view(0, (*size / 4).max(1), DType::F32);
            let seconds = bench.measure(operation, view, options.seconds)?;
            let size = if operation == "barrier" { 0 } else { *size };
            println!(
                "{{\"program\": \"lockstep {carrier}\", \"operation\": \"{operation}\", \"bytes\": {size}, \
                 \"ranks\": {}, \"median_us\": {:.2}, \"min_us\": {:.2}}}",
                options.ranks,
                seconds[BATCHES / 2] * 1e6,
                seconds[0] * 1e6
            );
        }
    }
    Ok(())
}

struct Bench<'m> {
    comm: Comm,
    group: Group,
    scratch: View<'m>,
}

impl Bench<'_> {
    /// Seconds per call of every batch, sorted.
    fn measure(
        &mut self,
        operation: &str,
        view: View<'_>,
        batch_seconds: f64,
    ) -> Result<Vec<f64>, CommError> {
        let mut calls = 1;
        // Double the number of calls until they fill the time, measured by rank 0.
        loop {
            let seconds = self.batch(operation, view, calls)?;
            let mut enough = u32::from(seconds > batch_seconds / 4.0);
            self.comm.all_gather_bytes(&self.group, Call::HOST, &enough.to_le_bytes(), &mut |m, bytes| {
                if m == 0 {
                    enough = u32::from(bytes[0]);
                }
            })?;
            if enough == 1 {
                break;
            }
            calls *= 2;
        }
        let calls = calls * 4;
        let batches = (0..BATCHES).map(|_| Ok(self.batch(operation, view, calls)? / calls as f64));
        let mut seconds = batches.collect::<Result<Vec<f64>, CommError>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds)
    }

    fn batch(&mut self, operation: &str, view: View<'_>, calls: usize) -> Result<f64, CommError> {
        let Bench { comm, group, scratch } = self;
        comm.barrier(group, Call::HOST)?;
        let start = Instant::now();
        for _ in 0..calls {
            match operation {
                "barrier" => comm.barrier(group, 1)?,
                "all_reduce" => comm.all_reduce(group, 2, &[view], *scratch)?,
                "reduce_scatter" => comm.reduce_scatter(group, 3, &[view], *scratch)?,
                "broadcast" => comm.broadcast(group, 4, Rank(0), &[view])?,
                "all_gather" => {
                    let share = group.share(view.len(), group.me());
                    let own = view.slice(share.start, share.elems());
                    comm.all_gather(group, 5, &[GatherPart { own, whole: view }])?;
                }
                other => panic!("unknown operation {other}"),
            }
        }
        comm.barrier(group, Call::HOST)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..][..2], 16).expect("hex")).collect()
}
