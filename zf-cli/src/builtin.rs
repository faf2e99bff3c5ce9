//! Names every crate with built-in stages once: a dependency that is never named is not linked, and its stages vanish.

use zf_comm as _;
use zf_model as _;
use zf_offload as _;
use zf_optim as _;
use zf_partition as _;
use zf_select as _;
