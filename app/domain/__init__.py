"""What is true: the rules of a saga as pure values and functions. Must not await, do IO, read a clock or roll dice."""
