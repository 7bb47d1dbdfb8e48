//! All runs that are served. Folders are searched and files are read when somebody asks, and not more often than needed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lockstep_observe::RunFiles;
use serde_json::{Value, json};

use crate::run_view::RunView;

/// How deep to search below a folder, as `lockstep runs ls` does.
const DEPTH: u32 = 3;
const MAX_RUNS: usize = 500;
/// Files are not looked at more often.
const REFRESH: Duration = Duration::from_millis(400);
/// How often to search for further runs.
const SEARCH: Duration = Duration::from_secs(5);
/// How often a request that waits looks at the files.
const WAIT_STEP: Duration = Duration::from_millis(200);
/// Runs whose numbers are in memory at the same time.
const MAX_LOADED: usize = 12;

pub(crate) struct Runs {
    folders: Vec<PathBuf>,
    max_values: usize,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// A run stays where it is: its index is its id.
    runs: Vec<Arc<Mutex<RunView>>>,
    by_dir: HashMap<PathBuf, usize>,
    /// Counts changes.
    revision: u64,
    refreshed: Option<Instant>,
    searched: Option<Instant>,
}

impl Runs {
    /// The folders need not exist yet.
    pub(crate) fn new(folders: Vec<PathBuf>, max_values: usize) -> Runs {
        Runs { folders, max_values, known: Mutex::default() }
    }

    /// All runs and the number of the last change.
    pub(crate) fn all(&self) -> (Vec<Arc<Mutex<RunView>>>, u64) {
        let mut known = locked(&self.known);
        if known.searched.is_none_or(|time| time.elapsed() >= SEARCH) {
            self.search(&mut known);
            known.searched = Some(Instant::now());
        }
        if known.refreshed.is_none_or(|time| time.elapsed() >= REFRESH) {
            let changes = known.runs.iter().filter(|run| locked(run).refresh()).count();
            known.revision += u64::from(changes > 0);
            known.refreshed = Some(Instant::now());
        }
        (known.runs.clone(), known.revision)
    }

    /// Adds the runs that are new.
    fn search(&self, known: &mut Known) {
        let found: Vec<RunFiles> =
            self.folders.iter().flat_map(|folder| RunFiles::find(folder, DEPTH)).collect();
        let before = known.runs.len();
        for files in found {
            if known.runs.len() >= MAX_RUNS {
                break;
            }
            let dir = files.dir().to_path_buf();
            if !known.by_dir.contains_key(&dir) {
                known.by_dir.insert(dir, known.runs.len());
                known.runs.push(Arc::new(Mutex::new(RunView::new(files, self.max_values))));
            }
        }
        if known.runs.len() > before {
            known.revision += 1;
            for run in &known.runs {
                locked(run).refresh();
            }
            set_names(&known.runs);
        }
    }

    pub(crate) fn get(&self, id: usize) -> Option<Arc<Mutex<RunView>>> {
        self.all().0.get(id).cloned()
    }

    /// Makes room before the numbers of a run are loaded: those that nobody has wanted for the longest time go.
    pub(crate) fn make_room(&self, id: usize) {
        let runs = self.all().0;
        let others = runs.iter().enumerate().filter(|(other, _)| *other != id);
        let mut loaded: Vec<(Instant, &Arc<Mutex<RunView>>)> = others
            .filter_map(|(_, run)| {
                let view = locked(run);
                view.is_loaded().then_some((view.used, run))
            })
            .collect();
        loaded.sort_by_key(|(used, _)| *used);
        let surplus = (loaded.len() + 1).saturating_sub(MAX_LOADED);
        loaded.iter().take(surplus).for_each(|(_, run)| locked(run).unload());
    }

    /// The list of runs as JSON.
    pub(crate) fn list_json(&self) -> Value {
        let (runs, revision) = self.all();
        let list: Vec<Value> =
            runs.iter().enumerate().map(|(id, run)| locked(run).summary_json(id)).collect();
        json!({ "revision": revision, "version": env!("CARGO_PKG_VERSION"), "runs": list })
    }

    /// Waits for a change after the one with this number, for a limited time.
    pub(crate) fn wait(&self, revision: u64, most: Duration, stopping: &AtomicBool) {
        let start = Instant::now();
        while self.all().1 == revision && start.elapsed() < most && !stopping.load(Ordering::Relaxed) {
            thread::sleep(WAIT_STEP);
        }
    }
}

/// A thread that has panicked leaves a state that is as good as any: files are read again.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names the runs: those with the same name by their folders.
fn set_names(runs: &[Arc<Mutex<RunView>>]) {
    let own = |view: &RunView| match view.info.name.as_str() {
        "" => view.dir().file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned()),
        name => name.to_owned(),
    };
    let mut count: HashMap<String, usize> = HashMap::new();
    for run in runs {
        *count.entry(own(&locked(run))).or_default() += 1;
    }
    for run in runs {
        let mut view = locked(run);
        let name = own(&view);
        view.name = if count[&name] > 1 { view.dir().display().to_string() } else { name };
    }
}
