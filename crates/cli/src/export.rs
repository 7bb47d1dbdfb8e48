//! `lockstep export`

use crate::args::Export;
use crate::report::{self, Failure};
use crate::train::boxed;

pub(crate) fn run(args: &Export) -> Result<(), Failure> {
    let dtype = args.dtype.map(Into::into);
    let exported = lockstep_train::export_checkpoint(&args.from, &args.out, dtype).map_err(boxed)?;
    exported.notes.iter().for_each(|note| report::say(note));
    report::say(&format!("{} as {}", exported.checkpoint.display(), exported.dtype));
    report::say(&format!("model in {}", args.out.display()));
    Ok(())
}
