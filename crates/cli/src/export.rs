//! `lockstep export`: a checkpoint as a Hugging Face model folder.

use crate::args::Export;
use crate::report::{self, Failure};
use crate::train::boxed;

pub(crate) fn run(args: &Export) -> Result<(), Failure> {
    let dtype = args.dtype.map(Into::into);
    let exported = lockstep_train::export_checkpoint(&args.from, &args.out, dtype).map_err(boxed)?;
    exported.notes.iter().for_each(|note| report::print_line(note));
    report::print_line(&format!("exported {} as {}", exported.checkpoint.display(), exported.dtype));
    report::print_line(&format!("model in {}", args.out.display()));
    Ok(())
}
