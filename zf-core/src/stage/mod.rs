//! The traits that stages implement. All are object-safe and `Send`; strategies do not know each other.

mod link;
mod offload;
mod optimizer;
mod partitioner;
mod schedule;
mod select;
mod tier;
mod transport;

pub use link::{Arrived, Link, Links, Traffic, Transfer, Way};
pub use offload::{
    AccumulateOn, Decision, HostPart, HostPool, HostUpdate, HostWork, Interval, Keeps, Landing, Offload, OffloadPolicy,
    Output, ParametersOn, Promotion, Site, Take, Taken, Wire,
};
pub use optimizer::{GroupRule, HostSlice, Hyper, Needs, Optimizer, OptimizerBase, Out, SquareSums, TensorSlice};
pub use partitioner::{Partitioner, Reshard, Transfers};
pub use schedule::Schedule;
pub use select::{Axis, Candidates, Every, Score, ScoreInput, ScoreNeeds, ScoreReduction, Selector};
pub use tier::{Span, Tier, TierBytes};
pub use transport::{Channel, Collective, CommBytes, Fabric, Group, Reduce, Request, Ticket, TicketState, Transport};
