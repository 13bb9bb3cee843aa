//! Requests, queue policies, plans and commits.
