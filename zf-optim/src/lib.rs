//! Update rules, learning-rate schedules, clipping and loss scaling of zenflow-rs.
