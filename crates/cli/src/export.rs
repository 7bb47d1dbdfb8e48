//! `lockstep export`: a checkpoint as a Hugging Face model folder.

use crate::args::Export;
use crate::report::{self, Failure};
use crate::train::boxed;

pub(crate) fn run(args: &Export) -> Result<(), Failure> {
    let dtype = args.dtype.map(Into::into);
    let merge = args.merge.then_some(lockstep_train::Merge { base: args.model.as_deref() });
    let exported = lockstep_train::export_checkpoint(&args.from, &args.out, dtype, merge).map_err(boxed)?;
    exported.notes.iter().for_each(|note| report::print_line(note));
    report::print_line(&format!("exported {} as {}", exported.checkpoint.display(), exported.dtype));
    report::print_line(&format!("model in {}", args.out.display()));
    Ok(())
}
