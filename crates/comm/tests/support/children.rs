//! Ranks in processes of their own: a test starts its own executable again, and ranks exchange data through a folder.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The variable that tells an executable that it is a child process: "role rank world folder".
pub const VARIABLE: &str = "LOCKSTEP_COMM_TEST_CHILD";

/// What a child process was started for.
pub struct Role {
    pub name: String,
    pub rank: u32,
    pub world: u32,
    pub folder: PathBuf,
}

/// This process's role, if a test started it.
pub fn role() -> Option<Role> {
    let text = std::env::var(VARIABLE).ok()?;
    let mut words = text.splitn(4, ' ');
    let mut next = || words.next().expect("four words").to_string();
    Some(Role {
        name: next(),
        rank: next().parse().unwrap(),
        world: next().parse().unwrap(),
        folder: next().into(),
    })
}

/// Starts this executable as a rank. It runs the test `entry`, which reads [`role`].
pub fn start(entry: &str, name: &str, rank: u32, world: u32, folder: &Path) -> Child {
    start_with(entry, name, rank, world, folder, &[])
}

/// Like [`start`], with environment variables.
pub fn start_with(
    entry: &str,
    name: &str,
    rank: u32,
    world: u32,
    folder: &Path,
    variables: &[(&str, String)],
) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", entry, "--nocapture", "--test-threads=1"])
        .env(VARIABLE, format!("{name} {rank} {world} {}", folder.display()))
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// An all-gather through files, used to connect.
pub struct FolderRendezvous {
    path: PathBuf,
    rank: u32,
    world: u32,
    round: u32,
}

impl FolderRendezvous {
    pub fn new(path: &Path, rank: u32, world: u32) -> FolderRendezvous {
        FolderRendezvous { path: path.to_path_buf(), rank, world, round: 0 }
    }

    pub fn gather(&mut self, mine: &[u8]) -> Vec<Vec<u8>> {
        self.round += 1;
        let name = |rank: u32| self.path.join(format!("{}-{rank}", self.round));
        let partial = self.path.join(format!("partial-{}", self.rank));
        std::fs::write(&partial, mine).unwrap();
        std::fs::rename(&partial, name(self.rank)).unwrap();
        (0..self.world).map(|rank| wait_for_file(&name(rank))).collect()
    }
}

pub fn wait_for_file(path: &Path) -> Vec<u8> {
    let start = Instant::now();
    loop {
        match std::fs::read(path) {
            Ok(bytes) => return bytes,
            Err(_) if start.elapsed() < Duration::from_secs(20) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => panic!("{}: {e}", path.display()),
        }
    }
}
