//! The traits that stages implement. All are object-safe and `Send`; strategies do not know each other.

mod optimizer;
mod partitioner;
mod schedule;
mod transport;

pub use optimizer::{GroupRule, HostSlice, Hyper, Needs, Optimizer, OptimizerBase, Out, SquareSums, TensorSlice};
pub use partitioner::{Partitioner, Reshard, Transfers};
pub use schedule::Schedule;
pub use transport::{Channel, Collective, CommBytes, Fabric, Group, Reduce, Request, Ticket, TicketState, Transport};
